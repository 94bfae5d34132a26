"""Rotary position embedding of queries and keys in one launch, with two bodies: Triton on CUDA, PyTorch everywhere.

Shapes: q [b, h, n, d], k [b, k, n, d], any strides; cos and sin [n, r/2] or [b, n, r/2], r <= d even. Elements i and i + r/2
of a head's first r turn by the angle of pair i (the layout of Llama's and GPT-NeoX's weights); those from r on stay.
Computed in fp32 and rounded once. Kept for the backward: cos and sin, which get no gradient. Source: Su et al., RoFormer,
arXiv:2104.09864, equation 34.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from trainfit.kernels.custom_op import declare, refuse_second_derivative
from trainfit.spec.errors import InputError


class Rope(torch.autograd.Function):
    """``Rope.apply(q, k, cos, sin)``."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return torch.ops.trainfit.rotate_pairs(q, k, cos, sin, False)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """A rotation's gradient is the rotation back."""
        refuse_second_derivative()
        return *torch.ops.trainfit.rotate_pairs(*gradients, *ctx.saved_tensors, True), None, None


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q and k, turned; in their dtypes and layouts. Registers the operation on first use; under ``torch.compile`` call
    ``register`` before.

    Raises:
        InputError: shapes or dtypes that do not fit together.
    """
    b, _, n, d = q.shape if q.dim() == 4 else (0, 0, 0, 0)
    fits = q.dim() == k.dim() == 4 and (k.shape[0], k.shape[2], k.shape[3]) == (b, n, d)
    angles = cos.shape == sin.shape and cos.shape[:-1] in ((n,), (b, n)) and 2 <= 2 * cos.shape[-1] <= d
    if not fits or not angles or q.dtype != k.dtype or cos.dtype != sin.dtype:
        told = ", ".join(
            f"{name} {list(x.shape)} {x.dtype}"
            for name, x in zip(("q", "k", "cos", "sin"), (q, k, cos, sin), strict=True)
        )
        raise InputError(
            f"rope takes [b, h, n, d], [b, k, n, d] and two [n, r/2], not {told}", "reshape them"
        )
    if not torch.compiler.is_compiling():
        register()
    return Rope.apply(q, k, cos, sin)  # pyright: ignore[reportReturnType]


def plain_rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, back: bool) -> tuple[Tensor, Tensor]:
    """The PyTorch body."""
    return _turned(q, cos, sin, back), _turned(k, cos, sin, back)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    half = cos.shape[-1]
    cos, sin = (t if t.dim() == 2 else t[:, None] for t in (cos, -sin if back else sin))
    wide = torch.promote_types(x.dtype, torch.float32)
    first, second = x[..., :half].to(wide), x[..., half : 2 * half].to(wide)
    out = torch.empty_like(x)
    out[..., :half] = first * cos - second * sin
    out[..., half : 2 * half] = second * cos + first * sin
    out[..., 2 * half :] = x[..., 2 * half :]
    return out


def triton_rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, back: bool) -> tuple[Tensor, Tensor]:
    """As ``plain_rotate``, one kernel."""
    from trainfit.kernels.rope import triton as rope_triton

    kernels: Any = rope_triton  # a constexpr argument takes a plain value
    b, h, n, d = q.shape
    half, more = cos.shape[-1], d - 2 * cos.shape[-1]
    turned = torch.empty_like(q), torch.empty_like(k)
    cos, sin = (t.expand(b, n, half) for t in (cos, sin))
    if b * n:
        kernels.rotate_kernel[(b * n,)](
            q, k, *turned, cos, sin, n, half, more, h, k.shape[1], -1.0 if back else 1.0,
            *q.stride(), *k.stride(), *turned[0].stride(), *turned[1].stride(), *cos.stride(), *sin.stride(),
            BLOCK_H=8, BLOCK_D=_power(half), BLOCK_MORE=_power(more), num_warps=2,
        )  # fmt: skip
    return turned


def _power(size: int) -> int:
    """The power of two not below it; 0 of 0."""
    return 1 << (size - 1).bit_length() if size else 0


@cache
def register() -> None:
    """Make ``torch.ops.trainfit.rotate_pairs``; a second call does nothing."""
    declare("rotate_pairs", _run, _fake)


def _run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, back: bool) -> tuple[Tensor, Tensor]:
    run = triton_rotate if q.is_cuda and q.dtype != torch.float64 else plain_rotate
    return run(q, k, cos, sin, back)


def _fake(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, back: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k)
