"""Read one set repeatedly to measure the memory that holds it; a program sums BLOCK fp32 a turn.

The address is another one at every turn and is known only as the kernel runs, so no compiler can take a read
out of the loop.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def repeated_reads_kernel(X, SUMS, num_blocks, step, turns, BLOCK: tl.constexpr, PAST_L1: tl.constexpr):
    """Sum blocks p, p + step, p + 2 step, ... of X, modulo their number, into SUMS[p] by program p."""
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    at = (program % num_blocks).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(turns):
        if PAST_L1:
            total += tl.load(X + at * BLOCK + columns, cache_modifier=".cg")
        else:
            total += tl.load(X + at * BLOCK + columns)
        at += step
        at = tl.where(at >= num_blocks, at - num_blocks, at)
    tl.store(SUMS + program, tl.sum(total, 0))
