"""Rotary position embedding of queries and keys in one launch, computed in fp32 and rounded once.

Shapes: q [b, h, n, d], k [b, k, n, d] with any strides; cos and sin [n, r/2] or [b, n, r/2], r <= d even.
Elements i and i + r/2 of a head are rotated by angle i (the layout of Llama's and GPT-NeoX's weights); those
from r on are copied. Source: Su et al., RoFormer, arXiv:2104.09864, equation 34.

Saved for backward: cos and sin, which get no gradient. Each direction allocates its results only.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from trainfit.kernels.custom_op import declare, refuse_second_derivative, triton_kernels
from trainfit.spec.errors import InputError


class Rope(torch.autograd.Function):
    """``Rope.apply(q, k, cos, sin)``."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return torch.ops.trainfit.rotate_pairs(q, k, cos, sin, False)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        refuse_second_derivative()
        return *torch.ops.trainfit.rotate_pairs(*gradients, *ctx.saved_tensors, True), None, None


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q and k; the results have their dtypes and layouts.

    Registers the operator on first use; call ``register`` before compiling.

    Raises:
        InputError: Shapes or dtypes that do not match.
    """
    b, _, n, d = q.shape if q.dim() == 4 else (0, 0, 0, 0)
    fits = q.dim() == k.dim() == 4 and (k.shape[0], k.shape[2], k.shape[3]) == (b, n, d)
    angles = cos.shape == sin.shape and cos.shape[:-1] in ((n,), (b, n)) and 2 <= 2 * cos.shape[-1] <= d
    if not fits or not angles or q.dtype != k.dtype or cos.dtype != sin.dtype:
        given = ", ".join(f"{list(x.shape)} {x.dtype}" for x in (q, k, cos, sin))
        raise InputError(
            f"rope takes [b, h, n, d], [b, k, n, d] and two [n, r/2], not {given}", "reshape them"
        )
    if not torch.compiler.is_compiling():
        register()
    return Rope.apply(q, k, cos, sin)  # pyright: ignore[reportReturnType]


@cache
def register() -> None:
    """Declare ``torch.ops.trainfit.rotate_pairs``."""
    declare("rotate_pairs", reference_rotate, _fake, triton=triton_rotate)


def reference_rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, back: bool) -> tuple[Tensor, Tensor]:
    """Return rotated q and k; ``back`` rotates by the negative angles, which is the gradient."""
    if back:
        sin = -sin
    return rotated(q, cos, sin), rotated(k, cos, sin)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [b, h, n, d] rotated in PyTorch, with its layout."""
    half = cos.shape[-1]
    cos, sin = (t if t.dim() == 2 else t[:, None] for t in (cos, sin))
    wide = torch.promote_types(x.dtype, torch.float32)
    first, second = x[..., :half].to(wide), x[..., half : 2 * half].to(wide)
    out = torch.empty_like(x)
    out[..., :half] = first * cos - second * sin
    out[..., half : 2 * half] = second * cos + first * sin
    out[..., 2 * half :] = x[..., 2 * half :]
    return out


def triton_rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, back: bool) -> tuple[Tensor, Tensor]:
    """Compute ``reference_rotate`` in one kernel."""
    b, h, n, d = q.shape
    half, unrotated = cos.shape[-1], d - 2 * cos.shape[-1]
    outputs = _fake(q, k, cos, sin, back)
    cos, sin = (t.expand(b, n, half) for t in (cos, sin))
    if b * n:
        triton_kernels("kernels.rope.triton").rotate_kernel[(b * n,)](
            q, k, *outputs, cos, sin, n, half, unrotated, h, k.shape[1], -1.0 if back else 1.0,
            *q.stride(), *k.stride(), *outputs[0].stride(), *outputs[1].stride(),
            *cos.stride(), *sin.stride(),
            BLOCK_H=8, BLOCK_D=_next_power(half), BLOCK_MORE=_next_power(unrotated), num_warps=2,
        )  # fmt: skip
    return outputs


def _next_power(size: int) -> int:
    """Return the next power of two from ``size`` on; 0 for 0."""
    return 1 << (size - 1).bit_length() if size else 0


def _fake(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, back: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k)
