"""RMSNorm with one interface and two bodies: Triton on CUDA, PyTorch everywhere.

Shapes: x [..., e], weight [e]; n rows of e. y = x w / sqrt(mean(x^2) + eps), computed in fp32 and rounded once, as
``torch.nn.RMSNorm``. Kept for the backward: x, the weight and one fp32 number a row. Source: Zhang and Sennrich,
arXiv:1910.07467, equation 4.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from trainfit.kernels.custom_op import declare, refuse_second_derivative
from trainfit.spec.errors import InputError

MAX_SIZE = 16384
"""Elements of a row that a program holds at once; with twice as many the backward spills kilobytes a thread."""
PROGRAMS = 528
"""Of the backward, four for each of an H200's multiprocessors: each adds up its rows' part of the weight's gradient, in order,
so the result repeats bit for bit on every GPU."""


class RMSNorm(torch.autograd.Function):
    """``RMSNorm.apply(x, weight, eps)``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, scale = torch.ops.trainfit.own_rms_norm(x.contiguous(), weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        refuse_second_derivative()
        x, weight, scale = ctx.saved_tensors
        given = gradients[0].contiguous()
        dx, parts = torch.ops.trainfit.own_rms_norm_backward(given, x.contiguous(), weight, scale)
        wanted = ctx.needs_input_grad[1]  # Not where the model is frozen.
        return dx, parts.sum(0).to(weight.dtype) if wanted else None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of each row, in x's dtype and shape. Registers the operations on first use; under ``torch.compile`` call
    ``register`` before.

    Raises:
        InputError: sizes or dtypes that do not fit together.
    """
    if x.dim() < 1 or weight.shape != x.shape[-1:] or not 1 <= x.shape[-1] <= MAX_SIZE:
        shapes = f"x {list(x.shape)}, weight {list(weight.shape)}"
        raise InputError(f"rms_norm takes [..., e] and [e], not {shapes}", f"use one e of 1 to {MAX_SIZE}")
    if not x.is_floating_point() or not weight.is_floating_point():
        raise InputError(f"dtypes {x.dtype}, {weight.dtype}", "use floating ones")
    if not torch.compiler.is_compiling():
        register()
    return RMSNorm.apply(x, weight, eps)  # pyright: ignore[reportReturnType]


# -- the PyTorch body -------------------------------------------------------------------------------------------------


def plain_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y, and 1 / sqrt(mean(x^2) + eps) of each row [n] in fp32 (fp64 of fp64)."""
    wide = x.to(_wide(x))
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * scale * weight).to(x.dtype), scale.reshape(-1)


def plain_backward(gradient: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x in its dtype, and of the weight in parts whose sum it is, [p, e] in the dtype of ``scale``: all in the first."""
    e = x.shape[-1]
    g, normed = gradient.reshape(-1, e).to(scale.dtype), x.reshape(-1, e) * scale[:, None]
    weighted = g * weight
    dx = scale[:, None] * (weighted - normed * (weighted * normed).mean(1, keepdim=True))
    parts = scale.new_zeros(_num_parts(scale), e)
    if len(parts):
        parts[0] = (g * normed).sum(0)
    return dx.to(x.dtype).view_as(x), parts


def _num_parts(scale: Tensor) -> int:
    return min(scale.numel(), PROGRAMS)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


# -- the Triton body ----------------------------------------------------------------------------------------------------


def triton_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As ``plain_forward``, one kernel."""
    from trainfit.kernels.rms_norm import triton as rms_norm_triton

    kernels: Any = rms_norm_triton  # a constexpr argument takes a plain value
    y, scale = _fake_forward(x, weight, eps)
    if x.numel():
        kernels.rms_norm_kernel[(scale.numel(),)](x, weight, y, scale, x.shape[-1], eps, **_tile(x.shape[-1]))
    return y, scale


def triton_backward(gradient: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """As ``plain_backward``, one kernel, a part from each of its programs."""
    from trainfit.kernels.rms_norm import triton as rms_norm_triton

    kernels: Any = rms_norm_triton
    n, e = scale.numel(), x.shape[-1]
    dx, parts = _fake_backward(gradient, x, weight, scale)
    if n:
        kernels.rms_norm_backward_kernel[(len(parts),)](
            gradient, x, weight, scale, dx, parts, n, e, **_tile(e)
        )
    return dx, parts


def _tile(e: int) -> dict[str, int]:
    block = 1 << (e - 1).bit_length()
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 512))}


# -- the operations -----------------------------------------------------------------------------------------------------


@cache
def register() -> None:
    """Make ``torch.ops.trainfit.own_rms_norm`` and its backward (of contiguous tensors); a second call does nothing."""
    declare("own_rms_norm", _run_forward, _fake_forward)
    declare("own_rms_norm_backward", _run_backward, _fake_backward)


def _run_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    run = triton_forward if x.is_cuda and x.dtype != torch.float64 else plain_forward
    return run(x, weight, eps)


def _run_backward(gradient: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    run = triton_backward if x.is_cuda and x.dtype != torch.float64 else plain_backward
    return run(gradient, x, weight, scale)


def _fake_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    rows = x.numel() // x.shape[-1]
    return torch.empty_like(x), torch.empty(rows, dtype=_wide(x), device=x.device)


def _fake_backward(gradient: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), scale.new_empty(_num_parts(scale), x.shape[-1])
