"""RMSNorm: y = x w / sqrt(mean(x^2) + eps), computed in fp32 and rounded once, as ``torch.nn.RMSNorm``.

Shapes: x [..., e], weight [e]; n rows of e elements. Source: Zhang and Sennrich, arXiv:1910.07467, equation
4.

Saved for backward: x, the weight and one fp32 value per row. The backward allocates the gradient of x and at
most ``MAX_PARTS`` fp32 rows of partial sums for the weight.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from trainfit.kernels.custom_op import declare, refuse_second_derivative, triton_kernels
from trainfit.spec.errors import InputError

MAX_SIZE = 16384  # Largest row of one program; at twice the size the backward spills kilobytes per thread
MAX_PARTS = 528
"""Partial sums of the weight's gradient: four programs for each of an H200's 132 multiprocessors. The number
does not depend on the GPU, and each program adds its rows in order, so the result is deterministic."""
TRITON = "kernels.rms_norm.triton"


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
        gradient = gradients[0].contiguous()
        dx, parts = torch.ops.trainfit.own_rms_norm_backward(gradient, x.contiguous(), weight, scale)
        return dx, parts.sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise each row of x; the result has x's dtype and shape.

    Registers the operators on first use; call ``register`` before compiling.

    Raises:
        InputError: Sizes or dtypes that do not match.
    """
    if x.dim() < 1 or weight.shape != x.shape[-1:] or not 1 <= x.shape[-1] <= MAX_SIZE:
        shapes = f"x {list(x.shape)}, weight {list(weight.shape)}"
        raise InputError(f"rms_norm takes [..., e] and [e], not {shapes}", f"use one e of 1 to {MAX_SIZE}")
    if not x.is_floating_point() or not weight.is_floating_point():
        raise InputError(f"dtypes {x.dtype}, {weight.dtype}", "use floating-point dtypes")
    if not torch.compiler.is_compiling():
        register()
    return RMSNorm.apply(x, weight, eps)  # pyright: ignore[reportReturnType]


@cache
def register() -> None:
    """Declare ``torch.ops.trainfit.own_rms_norm`` and its backward, which take contiguous tensors."""
    declare("own_rms_norm", reference_forward, _fake_forward, triton=triton_forward)
    declare("own_rms_norm_backward", reference_backward, _fake_backward, triton=triton_backward)


def reference_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return y and 1 / sqrt(mean(x^2) + eps) of each row, [n] in fp32 (fp64 for fp64)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * scale * weight).to(x.dtype), scale.reshape(-1)


def reference_backward(gradient: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of x, and partial sums [parts, e] of the weight's in the dtype of ``scale``."""
    dx, parts = wide_backward(gradient, x, weight, scale, min(scale.numel(), MAX_PARTS))
    return dx.to(x.dtype).view_as(x), parts


def wide_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, scale: Tensor, num_parts: int
) -> tuple[Tensor, Tensor]:
    """Return ``reference_backward``'s gradient of x [n, e] before it is rounded, and the partial sums."""
    e = x.shape[-1]
    g, normed = gradient.reshape(-1, e).to(scale.dtype), x.reshape(-1, e) * scale[:, None]
    weighted = g * weight
    dx = scale[:, None] * (weighted - normed * (weighted * normed).mean(1, keepdim=True))
    parts = scale.new_zeros(num_parts, e)
    if num_parts:
        parts[0] = (g * normed).sum(0)
    return dx, parts


def triton_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute ``reference_forward`` in one kernel."""
    y, scale = _fake_forward(x, weight, eps)
    if x.numel():
        triton_kernels(TRITON).rms_norm_kernel[(scale.numel(),)](
            x, weight, y, scale, x.shape[-1], eps, **_tile(x.shape[-1])
        )
    return y, scale


def triton_backward(gradient: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``reference_backward`` in one kernel, a partial sum per program."""
    n, e = scale.numel(), x.shape[-1]
    dx, parts = _fake_backward(gradient, x, weight, scale)
    if n:
        triton_kernels(TRITON).rms_norm_backward_kernel[(len(parts),)](
            gradient, x, weight, scale, dx, parts, n, e, **_tile(e)
        )
    return dx, parts


def _tile(e: int) -> dict[str, int]:
    block = 1 << (e - 1).bit_length()
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 512))}


def _fake_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    scale_dtype = torch.promote_types(x.dtype, torch.float32)
    return torch.empty_like(x), torch.empty(x.numel() // x.shape[-1], dtype=scale_dtype, device=x.device)


def _fake_backward(gradient: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), scale.new_empty(min(scale.numel(), MAX_PARTS), x.shape[-1])
