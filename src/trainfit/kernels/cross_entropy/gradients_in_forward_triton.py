"""A multiplication in Triton that costs nothing by 1."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def multiply_unless_one_kernel(X, RATIO, numel, BLOCK: tl.constexpr):
    """X *= RATIO, a program every so many blocks; if RATIO is 1 each returns when it has read it."""
    ratio = tl.load(RATIO).to(tl.float32)
    if ratio != 1.0:
        columns = tl.arange(0, BLOCK)
        start = tl.program_id(0).to(tl.int64) * BLOCK
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        while start < numel:
            at = start + columns
            x = tl.load(X + at, mask=at < numel, other=0.0).to(tl.float32)
            tl.store(X + at, (x * ratio).to(X.dtype.element_ty), mask=at < numel)
            start += step
