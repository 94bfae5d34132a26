"""RMSNorm in Triton. A program holds whole rows of e elements (BLOCK >= e); sums are in fp32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(X, W, Y, SCALE, e, eps, BLOCK: tl.constexpr):
    """Compute one row per program: y = x w scale with scale = 1 / sqrt(mean(x^2) + eps)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < e
    x = tl.load(X + row * e + columns, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(W + columns, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / e + eps)
    tl.store(SCALE + row, scale)
    tl.store(Y + row * e + columns, (x * scale * w).to(Y.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm_backward_kernel(G, X, W, SCALE, DX, PARTS, n, e, BLOCK: tl.constexpr):
    """Compute rows i, i + programs, ...: dx = scale (g w - y mean(g w y)) with y = x scale.

    PARTS[i] is the sum of g y over program i's rows.
    """
    first = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < e
    w = tl.load(W + columns, mask=inside, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK,), tl.float32)
    for iteration in range(0, tl.cdiv(n - tl.program_id(0), programs)):
        row = first + iteration * programs
        at = row * e + columns
        g = tl.load(G + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(SCALE + row)
        normed = x * scale
        dw += g * normed
        weighted = g * w
        dx = scale * (weighted - normed * (tl.sum(weighted * normed, 0) / e))
        tl.store(DX + at, dx.to(DX.dtype.element_ty), mask=inside)
    tl.store(PARTS + first * e + columns, dw, mask=inside)
