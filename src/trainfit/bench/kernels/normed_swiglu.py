"""RMSNorm, then SwiGLU of its halves: the forward chain of ``bench fusion``, eager, Triton and CUDA C++.

Shapes: x [n, 2f], weight [2f] -> y [n, f]. h = x weight / sqrt(mean(x^2) + eps), y = silu(h[:, :f]) h[:, f:].
The kernels compute in fp32 and round once; each byte of x is read once and each of y written once.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainfit.bench.kernels import nvcc
from trainfit.spec.errors import InputError

EPS = 1e-6
MAX_HALF = 8192  # Largest f: the CUDA C++ kernel holds whole rows in registers


def plain(x: Tensor, weight: Tensor) -> Tensor:
    """Compute the chain operation by operation; only the norm is fp32 inside, as models write it."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return gated(weight * (wide * scale).to(x.dtype))


def with_pytorchs_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Compute the chain with PyTorch's RMSNorm, on CUDA one kernel."""
    return gated(F.rms_norm(x, weight.shape, weight, EPS))


def gated(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    return F.silu(gate) * up


def triton_into(x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
    """Write the chain into ``y`` with one Triton kernel; all contiguous."""
    from trainfit.bench.kernels import normed_swiglu_triton as kernels

    n, f = _sizes(x, weight, y)
    block = 1 << (f - 1).bit_length()
    warps = min(16, max(1, block // 512))
    launcher: Any = kernels.normed_swiglu_kernel[(n,)]
    launcher(x, weight, y, f, EPS, BLOCK=block, num_warps=warps)
    return y


def cuda_into(x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
    """Write the chain into ``y`` with one CUDA C++ kernel; bf16, contiguous, f a multiple of 8."""
    n, f = _sizes(x, weight, y)
    if f % 8 or {x.dtype, weight.dtype, y.dtype} != {torch.bfloat16}:
        why = f"the CUDA C++ kernel takes bf16 and f in eights, not {x.dtype} and f = {f}"
        raise InputError(why, "use those")
    nvcc.launch("normed_swiglu", x, weight, y, ctypes.c_longlong(n), ctypes.c_int(f), ctypes.c_float(EPS))
    return y


def _sizes(x: Tensor, weight: Tensor, y: Tensor) -> tuple[int, int]:
    """Return n and f."""
    n, f = y.shape
    if x.shape != (n, 2 * f) or weight.shape != (2 * f,) or not 1 <= f <= MAX_HALF or n < 1:
        shapes = f"{list(x.shape)}, {list(weight.shape)} and {list(y.shape)}"
        why = f"normed_swiglu takes [n, 2f], [2f] and [n, f], not {shapes}"
        raise InputError(why, f"use one f of 1 to {MAX_HALF}")
    if not (x.is_contiguous() and weight.is_contiguous() and y.is_contiguous()):
        raise InputError("normed_swiglu takes contiguous tensors", "call .contiguous() first")
    return n, f
