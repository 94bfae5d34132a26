"""What the backward of FlashAttention needs beforehand, in Triton: by pointers for the Triton kernels, by TMA for Gluon's."""

from __future__ import annotations

import triton
import triton.language as tl

from trainfit.kernels.flash_attention.triton import LOG2_E, load_tile


@triton.jit
def _place(padded, BLOCK_M: tl.constexpr):
    """This program's first row, and its head of all batches. One axis: the others of a grid end at 65,535, which is fewer than
    a batch of short sequences has heads."""
    blocks = padded // BLOCK_M
    return tl.program_id(0) % blocks * BLOCK_M, tl.program_id(0) // blocks


@triton.jit
def prepare_kernel(
    OUT, DO, LSE, LSE_2, DELTA, n, padded, d, heads,
    o_batch, o_head, o_row: tl.constexpr, o_column, do_batch, do_head, do_row: tl.constexpr, do_column,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, EVEN_D: tl.constexpr,
):  # fmt: skip
    """delta = row sum of dO * O and ``lse`` in base 2, both padded to whole tiles.

    Rows that do not exist, or see no key, get an ``lse`` of infinity: their probabilities come out as 0.
    """
    first, batch_head = _place(padded, BLOCK_M)  # pyright: ignore[reportGeneralTypeIssues]
    batch, head = (batch_head // heads).to(tl.int64), (batch_head % heads).to(tl.int64)
    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    o_base, do_base = OUT + batch * o_batch + head * o_head, DO + batch * do_batch + head * do_head
    o = load_tile(o_base, first, rows, columns, o_row, o_column, n, d, False, EVEN_D)
    do = load_tile(do_base, first, rows, columns, do_row, do_column, n, d, False, EVEN_D)
    rows += first
    lse = tl.load(LSE + batch_head.to(tl.int64) * n + rows, mask=rows < n, other=float("-inf"))
    at = batch_head.to(tl.int64) * padded + rows
    tl.store(LSE_2 + at, tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E))
    tl.store(DELTA + at, tl.sum(o.to(tl.float32) * do.to(tl.float32), 1))


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
    """delta = row sum of dO * O and ``lse`` in base 2, both padded to whole tiles; zeros in dQ's sums.

    OUT, DO and DQ are tensor descriptors [b, heads, rows, d] with blocks [1, 1, BLOCK_M, BLOCK_D]: the hardware gives zeros
    outside and drops what is written there.

    Rows that do not exist, or see no key, get an ``lse`` of infinity: their probabilities come out as 0.
    """
    first, batch_head = _place(padded, BLOCK_M)  # pyright: ignore[reportGeneralTypeIssues]
    batch, head = batch_head // heads, batch_head % heads
    rows = first + tl.arange(0, BLOCK_M)
    out = _load(OUT, batch, head, first, BLOCK_M, BLOCK_D)
    do = _load(DO, batch, head, first, BLOCK_M, BLOCK_D)
    lse = tl.load(LSE + batch_head.to(tl.int64) * n + rows, mask=rows < n, other=float("-inf"))
    at = batch_head.to(tl.int64) * padded + rows
    tl.store(LSE_2 + at, tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E))
    tl.store(DELTA + at, tl.sum(out.to(tl.float32) * do.to(tl.float32), 1))
    _store(DQ, batch, head, first, tl.zeros((BLOCK_M, BLOCK_D), tl.float32), BLOCK_M, BLOCK_D)
