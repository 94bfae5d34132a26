"""Adding rows of equal tokens in Triton: one program per token of the sorted ones and block of columns."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_rows_kernel(
    KEPT, GRADIENT, TOKENS, POSITIONS, num_tokens, width, kept_stride, gradient_stride, padding,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add to KEPT [v, e] the rows of GRADIENT [n, e] of the run of equal TOKENS [n] that begins here.

    Programs within a run end at once, so that no two write the same row; ``padding`` has no gradient. A run's
    rows, at POSITIONS [n], are summed in fp32, ROWS at a time, and the sum is rounded once.
    """
    first = tl.program_id(0)
    token = tl.load(TOKENS + first)
    before = tl.load(TOKENS + first - 1, mask=first > 0, other=-1)
    if (token != before) & (token != padding):
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        is_column = columns < width
        total = tl.zeros((COLUMNS,), dtype=tl.float32)
        at = first
        found = ROWS
        while found == ROWS:
            rows = at + tl.arange(0, ROWS)
            is_same = tl.load(TOKENS + rows, mask=rows < num_tokens, other=-1) == token
            positions = tl.load(POSITIONS + rows, mask=is_same, other=0)
            places = GRADIENT + positions[:, None] * gradient_stride + columns[None, :]
            inside = is_same[:, None] & is_column[None, :]
            total += tl.sum(tl.load(places, mask=inside, other=0.0).to(tl.float32), 0)
            found = tl.sum(is_same.to(tl.int32), 0)
            at += ROWS
        kept = KEPT + token * kept_stride + columns
        total += tl.load(kept, mask=is_column, other=0.0).to(tl.float32)
        tl.store(kept, total.to(KEPT.dtype.element_ty), mask=is_column)
