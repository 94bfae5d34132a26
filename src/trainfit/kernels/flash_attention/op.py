"""FlashAttention: exact attention without an n x m matrix, in Triton or Gluon on CUDA, else in PyTorch.

With ``TRITON_INTERPRET=1`` the Triton kernels run on every device, in Triton's interpreter.

Shapes: q [b, h, n, d], k and v [b, k, m, d] with h a multiple of k (grouped-query attention), or all [b, n,
d]. Any n and m, d up to 512, any strides; fp16, bf16, fp32 (fp64 in PyTorch only). The result has q's dtype
and layout. Source: Dao, FlashAttention-2, arXiv:2307.08691, algorithms 1 and 2.

Saved for backward: q, k, v, the output and one fp32 log-sum-exp per row. The backward allocates three
gradients and two fp32 values per row; the Gluon kernels also an fp32 dQ (docs/internals/attention.md).
"""

import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from trainfit.kernels.custom_op import declare, interprets_triton, refuse_second_derivative
from trainfit.kernels.dry_launch import dry_launcher
from trainfit.kernels.flash_attention.dispatch import (
    Launch,
    Machine,
    backward_launch,
    forward_launch,
    machine_of,
)
from trainfit.kernels.flash_attention.reference import tiled_backward, tiled_forward, wide_of
from trainfit.spec.errors import InputError

MAX_HEAD_SIZE = 512
MAX_WIDE_HEAD_SIZE = 256  # In fp32


class FlashAttention(torch.autograd.Function):
    """``FlashAttention.apply(q, k, v, is_causal=False, scale=None)`` with the device's fastest kernels.

    ``grad_fn.saved_tensors`` are q, k, v, the output and the log-sum-exp, [b, n] or [b, h, n]. There is no
    second derivative. Registers the operators on first use; call ``register`` before compiling.
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
    """``FlashAttention`` with the tiled PyTorch reference on every device."""

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
    """Return softmax(scale * q k^T) v and register the operators on first use.

    Args:
        is_causal: Query i attends to keys up to i + m - n.
        scale: None: 1 / sqrt(d).

    Raises:
        InputError: Shapes, dtypes or a head size that the kernels do not support.
    """
    register()
    return attend(q, k, v, is_causal, scale)


def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None) -> Tensor:
    """Compute ``flash_attention`` in compiled code, after ``register``; inputs are cast under autocast.

    The operator has a registered autograd formula, because torch 2.11 does not recompute within
    autograd.Function.
    """
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    check(q, k, v)
    scale = scale if scale is not None else 1 / math.sqrt(q.shape[-1])
    if q.dim() == 3:
        q, k, v = (x[:, None] for x in (q, k, v))
        return torch.ops.trainfit.flash_attention(q, k, v, is_causal, scale)[0][:, 0]
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


def _by_heads(run: Any, tensors: tuple[Tensor, ...], *settings: Any) -> tuple[Tensor, ...]:
    """Call ``run`` on [b, h, ...] tensors, with one head if they are [b, ...]."""
    if tensors[0].dim() == 4:
        return run(*tensors, *settings)
    return tuple(x[:, 0] for x in run(*(x[:, None] for x in tensors), *settings))


def check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise InputError unless the kernels support tensors of these shapes and dtypes."""
    if q.dim() not in (3, 4) or not q.dim() == k.dim() == v.dim():
        raise InputError(f"attention takes [b, n, d] or [b, h, n, d], not {_shapes(q, k, v)}", "reshape them")
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1]:
        raise InputError(f"batch and head size differ: {_shapes(q, k, v)}", "make them equal")
    if q.dim() == 4 and (not k.shape[1] or q.shape[1] % k.shape[1]):
        raise InputError(
            f"the query heads are no multiple of the key heads: {_shapes(q, k, v)}", "change either number"
        )
    if not 1 <= q.shape[-1] <= MAX_HEAD_SIZE:
        raise InputError(
            f"head size {q.shape[-1]}: the kernels hold a whole head",
            f"use 1 to {MAX_HEAD_SIZE}, or attention: sdpa",
        )
    if q.shape[-1] > MAX_WIDE_HEAD_SIZE and q.dtype == torch.float32:
        raise InputError(
            f"head size {q.shape[-1]} in fp32: the kernels hold a whole head",
            f"use 1 to {MAX_WIDE_HEAD_SIZE}, 16 bits, or attention: sdpa",
        )
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise InputError(f"dtypes {q.dtype}, {k.dtype}, {v.dtype}", "use one floating dtype for all three")


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"


@cache
def register() -> None:
    """Declare ``torch.ops.trainfit.flash_attention`` and its backward."""
    from torch.utils.flop_counter import register_flop_formula

    for name, run, fake, launch_of in (
        ("flash_attention", _run_forward, _fake_forward, forward_launch),
        ("flash_attention_backward", _run_backward, _fake_backward, backward_launch),
    ):
        declare(name, run, fake, dry_run=partial(_dry_run, launch_of), kernel=partial(_kernel, launch_of))
    torch.library.register_autograd(
        "trainfit::flash_attention", _differentiate, setup_context=_keep_for_backward
    )
    # torch.compile's activation memory budget weighs recomputation by PyTorch's FLOP counter.
    register_flop_formula(torch.ops.trainfit.flash_attention)(_forward_flops)
    register_flop_formula(torch.ops.trainfit.flash_attention_backward)(_backward_flops)


def _run_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return _run(forward_launch, tiled_forward, q, k, v, is_causal, scale)


def _run_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _run(backward_launch, tiled_backward, gradient, q, k, v, out, lse, is_causal, scale)


def _run(launch_of: Callable[..., Launch], tiled: Callable[..., Any], *arguments: Any) -> Any:
    """Run the device's kernels on the tensors' device, outside autocast.

    A context is entered only where it changes something, because that costs as much as a launch.
    """
    device, machine = arguments[0].device, machine_of(arguments[0].device)
    run: Callable[..., Any] = tiled if machine is None else launch_of(*arguments, machine)
    if arguments[0].dtype == torch.bfloat16 and interprets_triton():
        run = partial(_widened, run)
    with ExitStack() as contexts:
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            contexts.enter_context(torch.cuda.device(device))
        if torch.is_autocast_enabled(device.type):
            contexts.enter_context(torch.autocast(device.type, enabled=False))
        return run(*arguments)


def _widened(run: Callable[..., Any], *arguments: Any) -> Any:
    """Run on bf16 tensors in fp32: the interpreter's products of bf16 are wrong (Triton 3.7 and 3.9)."""
    wide = [x.float() if isinstance(x, Tensor) else x for x in arguments]
    return tuple(x.bfloat16() if x.dim() == 4 else x for x in run(*wide))  # The log-sum-exp stays in fp32.


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.is_causal, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # No zero gradient of the log-sum-exp.


def _differentiate(ctx: Any, gradient: Tensor, _: None) -> Any:
    refuse_second_derivative()
    dq, dk, dv = torch.ops.trainfit.flash_attention_backward(
        gradient, *ctx.saved_tensors, ctx.is_causal, ctx.scale
    )
    return dq, dk, dv, None, None


def _dry_run(launch_of: Callable[..., Launch], *arguments: Any, capability: tuple[int, int]) -> Any:
    return launch_of(*arguments, Machine(capability))(*arguments, by=dry_launcher)


def _kernel(launch_of: Callable[..., Launch], *arguments: Any, capability: tuple[int, int]) -> str:
    return launch_of(*arguments, Machine(capability)).kernel


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), torch.empty(q.shape[:3], dtype=wide_of(q.dtype), device=q.device)


def _fake_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _forward_flops(q_bhnd: Any, k_bkmd: Any, *_: Any, **__: Any) -> int:
    """Return the FLOPs of two products over all pairs, as PyTorch's counter does for attention."""
    b, h, n, d = q_bhnd
    return 4 * b * h * n * k_bkmd[2] * d


def _backward_flops(_: Any, q_bhnd: Any, k_bkmd: Any, *__: Any, **___: Any) -> int:
    """Return the FLOPs of five products; the two that the Triton kernels compute twice count once."""
    return 5 * _forward_flops(q_bhnd, k_bkmd) // 2
