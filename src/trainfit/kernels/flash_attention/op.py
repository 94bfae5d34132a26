"""FlashAttention with one interface and two bodies: Triton on CUDA, tiled PyTorch everywhere.

Shapes: q [b, h, n, d], k and v [b, k, m, d] with h a multiple of k (grouped heads), or all [b, n, d] (one head). Any n
and m, any d up to 256, any strides; fp16, bf16, fp32 (and fp64 in the PyTorch body). The result has q's dtype and q's
layout. Kept for the backward: q, k, v, the output and one fp32 log-sum-exp a row; nothing of size n x m ever exists.

Both bodies are the custom operations ``trainfit::flash_attention`` and ``trainfit::flash_attention_backward``, so fake
tensors, torch.compile and checkpointing know them. Source: Dao, FlashAttention-2, arXiv:2307.08691, algorithms 1, 2.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from trainfit.kernels.custom_op import declare, has_module, refuse_second_derivative
from trainfit.kernels.flash_attention.reference import tiled_backward, tiled_forward, wide_of
from trainfit.spec.errors import InputError

MAX_HEAD_SIZE = 256


class FlashAttention(torch.autograd.Function):
    """``FlashAttention.apply(q, k, v, is_causal=False, scale=None)``: the fastest body that the device has.

    Has no second derivative. Keeps q, k, v, the output and the log-sum-exp, [b, n] or [b, h, n], as ``grad_fn.saved_tensors``. Registers the operations
    on first use; to be compiled into one graph, ``register`` has been called.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None
    ) -> Tensor:
        if not torch.compiler.is_compiling():
            register()
        return _forward(ctx, q, k, v, is_causal, scale, torch.ops.trainfit.flash_attention)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _backward(ctx, gradients[0], torch.ops.trainfit.flash_attention_backward)


class TiledAttention(torch.autograd.Function):
    """The same in plain PyTorch, tile by tile: the reference, and what runs where Triton does not."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None
    ) -> Tensor:
        return _forward(ctx, q, k, v, is_causal, scale, tiled_forward)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _backward(ctx, gradients[0], tiled_backward)


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """softmax(scale * q k^T) v; ``scale`` None: 1 / sqrt(d). Registers the operations on first use.

    Raises:
        InputError: shapes, dtypes or a head size that do not fit together.
    """
    register()
    return attend(q, k, v, is_causal, scale)


def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None) -> Tensor:
    """As ``flash_attention``, for code that is compiled: ``register`` has been called. Obeys autocast, as PyTorch's own.

    The operation differentiates itself: within an autograd.Function torch 2.11's compiler forgets that it may be computed
    again.
    """
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    check(q, k, v)
    scale = scale if scale is not None else 1 / math.sqrt(q.shape[-1])
    if q.dim() == 3:
        return torch.ops.trainfit.flash_attention(q[:, None], k[:, None], v[:, None], is_causal, scale)[0][
            :, 0
        ]
    return torch.ops.trainfit.flash_attention(q, k, v, is_causal, scale)[0]


def _forward(
    ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None, run: Any
) -> Tensor:
    check(q, k, v)
    ctx.is_causal, ctx.scale = is_causal, scale if scale is not None else 1 / math.sqrt(q.shape[-1])
    out, lse = _by_heads(run, (q, k, v), is_causal, ctx.scale)
    ctx.save_for_backward(q, k, v, out, lse)
    return out


def _backward(ctx: Any, gradient: Tensor, run: Any) -> Any:
    refuse_second_derivative()
    dq, dk, dv = _by_heads(run, (gradient, *ctx.saved_tensors), ctx.is_causal, ctx.scale)
    return dq, dk, dv, None, None


def _by_heads(run: Any, tensors: tuple[Tensor, ...], *how: Any) -> tuple[Tensor, ...]:
    """``run`` of [b, h, ...] tensors, or of [b, ...] ones as those of one head."""
    if tensors[0].dim() == 4:
        return run(*tensors, *how)
    return tuple(x[:, 0] for x in run(*(x[:, None] for x in tensors), *how))


def check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Nothing, if attention of these tensors is defined.

    Raises:
        InputError: what does not fit, and what would.
    """
    if q.dim() not in (3, 4) or not q.dim() == k.dim() == v.dim():
        raise InputError(f"attention takes [b, n, d] or [b, h, n, d], not {_shapes(q, k, v)}", "reshape them")
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1]:
        raise InputError(f"batch and head size differ: {_shapes(q, k, v)}", "make them equal")
    if q.dim() == 4 and (not k.shape[1] or q.shape[1] % k.shape[1]):
        raise InputError(
            f"the query heads are no multiple of the key heads: {_shapes(q, k, v)}", "make them one"
        )
    if not 1 <= q.shape[-1] <= MAX_HEAD_SIZE:
        raise InputError(
            f"head size {q.shape[-1]}: the kernels hold a whole head",
            f"use 1 to {MAX_HEAD_SIZE}, or attention: sdpa",
        )
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise InputError(f"dtypes {q.dtype}, {k.dtype}, {v.dtype}", "use one floating dtype for all three")


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"


# -- the operations -----------------------------------------------------------------------------------------------------


@cache
def register() -> None:
    """Make ``torch.ops.trainfit.flash_attention`` and its backward; a second call does nothing."""
    from torch.utils.flop_counter import register_flop_formula

    declare("flash_attention", _run_forward, _fake_forward, dry_run=_dry_run_forward, kernel=_forward_kernel)
    declare(
        "flash_attention_backward", _run_backward, _fake_backward, dry_run=_dry_run_backward, kernel=_backward_kernel
    )  # fmt: skip
    torch.library.register_autograd(
        "trainfit::flash_attention", _differentiate, setup_context=_keep_for_backward
    )
    # The compiler's memory budget asks torch's counter what is dear to compute again.
    register_flop_formula(torch.ops.trainfit.flash_attention)(_forward_flops)
    register_flop_formula(torch.ops.trainfit.flash_attention_backward)(_backward_flops)


def _run_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    from trainfit.kernels.flash_attention.dispatch import forward_launch, machine_of

    run = forward_launch(q, k, v, scale, machine_of(q.device)) if _has_kernels(q) else tiled_forward
    with _on_its_device(q), _without_autocast(q):
        return run(q, k, v, is_causal, scale)


def _run_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    from trainfit.kernels.flash_attention.dispatch import backward_launch, machine_of

    run = tiled_backward
    if _has_kernels(q):
        run = backward_launch(gradient, q, k, v, out, scale, machine_of(q.device))
    with _on_its_device(q), _without_autocast(q):
        return run(gradient, q, k, v, out, lse, is_causal, scale)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.is_causal, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # No zeros for the log-sum-exp's.


def _differentiate(ctx: Any, gradient: Tensor, _: None) -> Any:
    refuse_second_derivative()
    dq, dk, dv = torch.ops.trainfit.flash_attention_backward(
        gradient, *ctx.saved_tensors, ctx.is_causal, ctx.scale
    )
    return dq, dk, dv, None, None


def _on_its_device(q: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensors'."""
    is_elsewhere = q.is_cuda and q.device.index != torch.cuda.current_device()
    return torch.cuda.device(q.device) if is_elsewhere else nullcontext()


def _without_autocast(q: Tensor) -> AbstractContextManager[Any]:
    """Entering autocast's own context costs as much as a launch, so only where it is on."""
    kind = q.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _has_kernels(q: Tensor) -> bool:
    return q.is_cuda and has_module("triton")


def _dry_run_forward(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, *, capability: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    from trainfit.kernels.dry_launch import dry_launcher
    from trainfit.kernels.flash_attention.dispatch import Machine, forward_launch

    launch = forward_launch(q, k, v, scale, Machine(capability))
    return launch(q, k, v, is_causal, scale, by=dry_launcher)


def _dry_run_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool, scale: float,
    *, capability: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from trainfit.kernels.dry_launch import dry_launcher
    from trainfit.kernels.flash_attention.dispatch import Machine, backward_launch

    launch = backward_launch(gradient, q, k, v, out, scale, Machine(capability))
    return launch(gradient, q, k, v, out, lse, is_causal, scale, by=dry_launcher)


def _forward_kernel(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, *, capability: tuple[int, int]
) -> str:
    from trainfit.kernels.flash_attention.dispatch import Machine, forward_launch

    return forward_launch(q, k, v, scale, Machine(capability)).kernel


def _backward_kernel(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool, scale: float,
    *, capability: tuple[int, int],
) -> str:  # fmt: skip
    from trainfit.kernels.flash_attention.dispatch import Machine, backward_launch

    return backward_launch(gradient, q, k, v, out, scale, Machine(capability)).kernel


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), torch.empty(q.shape[:3], dtype=wide_of(q.dtype), device=q.device)


def _fake_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _forward_flops(q_bhnd: Any, k_bkmd: Any, *_: Any, **__: Any) -> int:
    """Two products over all pairs, as torch's counter has attention."""
    b, h, n, d = q_bhnd
    return 4 * b * h * n * k_bkmd[2] * d


def _backward_flops(_: Any, q_bhnd: Any, k_bkmd: Any, *__: Any, **___: Any) -> int:
    """Five products: scores again, and two for each of the forward's; what the plain kernels make twice is not counted here."""
    return 5 * _forward_flops(q_bhnd, k_bkmd) // 2
