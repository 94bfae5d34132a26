"""SwiGLU in Triton, in fp32. A program computes BLOCK elements of one row of [n, f]."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _row_and_columns(f, BLOCK: tl.constexpr):
    """Return the program's row and columns."""
    blocks = tl.cdiv(f, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    return row, tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def swiglu_kernel(GATE, UP, OUT, gate_stride, up_stride, f, BLOCK: tl.constexpr):
    """Compute out = gate sigmoid(gate) up."""
    row, at = _row_and_columns(f, BLOCK)  # pyright: ignore[reportGeneralTypeIssues]
    inside = at < f
    g = tl.load(GATE + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(UP + row * up_stride + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(OUT + row * f + at, (g * tl.sigmoid(g) * u).to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward_kernel(D, GATE, UP, BOTH, gate_stride, up_stride, f, BLOCK: tl.constexpr):
    """Compute BOTH [n, 2f]: the gradient of gate, then that of up."""
    row, at = _row_and_columns(f, BLOCK)  # pyright: ignore[reportGeneralTypeIssues]
    inside = at < f
    d = tl.load(D + row * f + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(GATE + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(UP + row * up_stride + at, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    dtype = BOTH.dtype.element_ty
    tl.store(BOTH + row * 2 * f + at, (d * u * s * (1.0 + g * (1.0 - s))).to(dtype), mask=inside)
    tl.store(BOTH + row * 2 * f + f + at, (d * g * s).to(dtype), mask=inside)
