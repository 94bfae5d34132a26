"""The end of FlashAttention's backward: dQ's fp32 sums, scaled and cast, in one pass over them."""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
# (kernel parameters annotated `tl.constexpr` are plain numbers to the caller)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scale_by_thread_kernel(
    sums, made, scale, batch_stride, head_stride, row_stride, heads, n, rows_padded, d,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """``made`` ([b, h, n, d]) = ``sums`` * ``scale`` in its dtype; half a tile of sums (64 x 64) lies as threads held it.

    Order: column 8, warp of 16 rows, row, column 2, half of the 16 rows, column (PTX manual, wgmma's accumulator, m64n64).
    """
    halves = rows_padded * BLOCK_D // 4096
    half, batch_head = tl.program_id(0) % halves, (tl.program_id(0) // halves).to(tl.int64)
    order = tl.arange(0, 4096)
    x = tl.load(sums + batch_head * rows_padded * BLOCK_D + half * 4096 + order) * scale
    x = tl.permute(tl.reshape(x, (8, 4, 8, 4, 2, 2)), (1, 4, 2, 0, 3, 5))
    x = tl.reshape(x, (64, 64))
    rows, columns = half // 2 * BLOCK_M + tl.arange(0, 64), tl.arange(0, 64)
    if BLOCK_M > 64:
        rows += half % 2 * 64
    else:
        columns += half % 2 * 64
    first = made + batch_head // heads * batch_stride + batch_head % heads * head_stride
    at = first + rows[:, None].to(tl.int64) * row_stride + columns[None, :]
    tl.store(at, x.to(made.dtype.element_ty), mask=(rows < n)[:, None] & (columns < d)[None, :])
