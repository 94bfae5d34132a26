"""SwiGLU and its gradients in PyTorch; shapes as in op.py."""

import torch
from torch import Tensor


def forward(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, [n, f]."""
    g = gate.to(torch.promote_types(gate.dtype, torch.float32))
    return (g * g.sigmoid() * up).to(gate.dtype)


def backward(gradient: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """Return the gradients of gate and up as the halves of one tensor, [n, 2f]."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    d, g, u = gradient.to(wide), gate.to(wide), up.to(wide)
    s = g.sigmoid()
    return torch.cat((d * u * s * (1 + g * (1 - s)), d * g * s), 1).to(gate.dtype)
