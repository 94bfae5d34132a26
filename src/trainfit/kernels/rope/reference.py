"""Rotary position embedding in PyTorch; shapes as in op.py."""

import torch
from torch import Tensor


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, back: bool) -> tuple[Tensor, Tensor]:
    """Return rotated q and k; ``back`` rotates by the negative angles, which is the gradient."""
    if back:
        sin = -sin
    return _rotated(q, cos, sin), _rotated(k, cos, sin)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    cos, sin = (t if t.dim() == 2 else t[:, None] for t in (cos, sin))
    wide = torch.promote_types(x.dtype, torch.float32)
    first, second = x[..., :half].to(wide), x[..., half : 2 * half].to(wide)
    out = torch.empty_like(x)
    out[..., :half] = first * cos - second * sin
    out[..., half : 2 * half] = second * cos + first * sin
    out[..., 2 * half :] = x[..., 2 * half :]
    return out
