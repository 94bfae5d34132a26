"""RMSNorm, SwiGLU and RoPE in PyTorch, and the gradients of a function and its definition."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-6


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def rms(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, w.shape, w, EPS)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def angles(n: int, half: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    turns = torch.arange(n)[:, None] * 10.0 ** -torch.arange(half)
    return turns.cos().to(dtype), turns.sin().to(dtype)


def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """transformers' rule: x cos + rotate_half(x) sin over the first r, both halves with the same angles."""
    r = 2 * cos.shape[-1]
    cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)

    def turn(x: Tensor) -> Tensor:
        first, second = x[..., :r].chunk(2, -1)
        rotated = x[..., :r] * cos + torch.cat((-second, first), -1) * sin
        return torch.cat((rotated, x[..., r:]), -1)

    return turn(q), turn(k)


def results(
    run: Callable[..., Any], definition: Callable[..., Any], given: list[Tensor], dtype: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    """Outputs and gradients in ``dtype``, each with that of the definition in fp64 from the same values."""
    found = []
    for function, kind in ((run, dtype), (definition, torch.float64)):
        leaves = [x.to(kind).requires_grad_() for x in given]
        out = function(*leaves)
        outs = out if isinstance(out, tuple) else (out,)
        upstream = [randn(*x.shape, dtype=dtype).to(x) for x in outs]
        found.append([*outs, *torch.autograd.grad(outs, leaves, upstream)])
    return list(zip(*found, strict=True))
