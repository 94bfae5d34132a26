"""Passes before and after FlashAttention's Gluon backward in Triton: row sums of dO * O, scaling of dQ."""

from __future__ import annotations

import triton
import triton.language as tl

from trainfit.kernels.flash_attention.triton import LOG2_E, first_row_and_head


@triton.jit
def _load(descriptor, batch, head, row, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    return descriptor.load([batch, head, row, 0]).reshape(ROWS, BLOCK_D)


@triton.jit
def _store(descriptor, batch, head, row, tile, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    descriptor.store([batch, head, row, 0], tile.to(descriptor.dtype).reshape(1, 1, ROWS, BLOCK_D))


@triton.jit
def prepare_tma_kernel(
    OUT, DO, DQ, LSE, LSE_2, DELTA, n, padded, heads,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute the results of ``attention_prepare_kernel`` (triton.py) through TMA, and set dQ to zeros.

    OUT, DO and DQ are tensor descriptors [b, heads, rows, d] with blocks [1, 1, BLOCK_M, BLOCK_D]: the
    hardware reads zeros outside and drops writes there.
    """
    first, batch_head = first_row_and_head(padded, BLOCK_M)  # pyright: ignore[reportGeneralTypeIssues]
    batch, head = batch_head // heads, batch_head % heads
    rows = first + tl.arange(0, BLOCK_M)
    out = _load(OUT, batch, head, first, BLOCK_M, BLOCK_D)
    do = _load(DO, batch, head, first, BLOCK_M, BLOCK_D)
    lse = tl.load(LSE + batch_head.to(tl.int64) * n + rows, mask=rows < n, other=float("-inf"))
    at = batch_head.to(tl.int64) * padded + rows
    tl.store(LSE_2 + at, tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E))
    tl.store(DELTA + at, tl.sum(out.to(tl.float32) * do.to(tl.float32), 1))
    _store(DQ, batch, head, first, tl.zeros((BLOCK_M, BLOCK_D), tl.float32), BLOCK_M, BLOCK_D)


@triton.jit
def scale_by_thread_kernel(
    SUMS, OUT, scale, batch_stride, head_stride, row_stride, heads, n, rows_padded, d,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write OUT [b, h, n, d] = SUMS * scale; each 64 x 64 half of a tile of SUMS is in thread order.

    Thread order: column 8, warp of 16 rows, row, column 2, half of the 16 rows, column (PTX ISA, wgmma
    accumulator m64n64).
    """
    halves = rows_padded * BLOCK_D // 4096
    half, batch_head = tl.program_id(0) % halves, (tl.program_id(0) // halves).to(tl.int64)
    order = tl.arange(0, 4096)
    x = tl.load(SUMS + batch_head * rows_padded * BLOCK_D + half * 4096 + order) * scale
    x = tl.permute(tl.reshape(x, (8, 4, 8, 4, 2, 2)), (1, 4, 2, 0, 3, 5))
    x = tl.reshape(x, (64, 64))
    rows, columns = half // 2 * BLOCK_M + tl.arange(0, 64), tl.arange(0, 64)
    if BLOCK_M > 64:
        rows += half % 2 * 64
    else:
        columns += half % 2 * 64
    first = OUT + batch_head // heads * batch_stride + batch_head % heads * head_stride
    at = first + rows[:, None].to(tl.int64) * row_stride + columns[None, :]
    tl.store(at, x.to(OUT.dtype.element_ty), mask=(rows < n)[:, None] & (columns < d)[None, :])
