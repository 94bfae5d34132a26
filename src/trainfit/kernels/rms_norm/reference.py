"""RMSNorm and its gradients in PyTorch; shapes as in op.py."""

import torch
from torch import Tensor

MAX_PARTS = 528
"""Partial sums of the weight's gradient: four programs for each of an H200's 132 multiprocessors. The number
does not depend on the GPU, and each program adds its rows in order, so the result is deterministic."""


def forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return y and 1 / sqrt(mean(x^2) + eps) of each row, [n] in fp32 (fp64 for fp64)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * scale * weight).to(x.dtype), scale.reshape(-1)


def backward(gradient: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of x, and partial sums [parts, e] of the weight's in the dtype of ``scale``."""
    e = x.shape[-1]
    g, normed = gradient.reshape(-1, e).to(scale.dtype), x.reshape(-1, e) * scale[:, None]
    weighted = g * weight
    dx = scale[:, None] * (weighted - normed * (weighted * normed).mean(1, keepdim=True))
    parts = scale.new_zeros(num_parts(scale), e)
    if len(parts):
        parts[0] = (g * normed).sum(0)
    return dx.to(x.dtype).view_as(x), parts


def num_parts(scale: Tensor) -> int:
    """Return the number of partial sums for this many rows."""
    return min(scale.numel(), MAX_PARTS)
