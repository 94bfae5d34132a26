"""RMSNorm and SwiGLU as one Triton kernel in fp32: a program holds a row of 2f elements (BLOCK >= f)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def normed_swiglu_kernel(X, W, Y, f, eps, BLOCK: tl.constexpr):
    """Compute one row: h = x w / sqrt(mean(x^2) + eps), y = silu(first half of h) x second half."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < f
    start = X + row * 2 * f
    gate = tl.load(start + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(start + f + columns, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(gate * gate + up * up, 0) / (2 * f) + eps)
    gate *= scale * tl.load(W + columns, mask=inside, other=0.0).to(tl.float32)
    up *= scale * tl.load(W + f + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(Y + row * f + columns, (gate * tl.sigmoid(gate) * up).to(Y.dtype.element_ty), mask=inside)
