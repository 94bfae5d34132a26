"""FlashAttention's backward for wide heads in Triton: tiles loaded by TMA; dV, dK and dQ by a kernel each.

Registers do not hold dK and dV of 128 keys together where heads have more than 128 columns, and the tensor
cores are only full with 64 rows for each group of four warps. Each kernel computes the scores again, eight
products in all. Nothing is added atomically, so results repeat bit by bit. Shapes and rows as in triton.py;
Q, K, V and DO are tensor descriptors [b, heads, rows, d], outside of which the hardware reads zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl

from trainfit.kernels.flash_attention.triton import _key_range, _store_tile, block_and_head


@triton.jit
def _rows(descriptor, batch, head, first, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    return descriptor.load([batch, head, first, 0]).reshape(ROWS, BLOCK_D)


@triton.jit
def _key_tiles(
    total, k, v, Q, DO, lse_base, delta_base, batch, head, start, stop, keys, columns_m, n, m, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr, OF_VALUES: tl.constexpr,
):  # fmt: skip
    """Fold query rows ``start`` to ``stop`` into the gradient of a block of values, or of keys."""
    for first in range(start, stop, BLOCK_M):
        q = _rows(Q, batch, head, first, BLOCK_M, BLOCK_D)
        lse = tl.load(lse_base + first + columns_m)
        scores = tl.dot(k, q.T)
        do = _rows(DO, batch, head, first, BLOCK_M, BLOCK_D)
        if not OF_VALUES:
            dp = tl.dot(v, do.T)
        p = tl.exp2(scores * scale_log2 - lse[None, :])
        if MASKED:
            p = tl.where((first + columns_m)[None, :] + (m - n) >= keys[:, None], p, 0.0)
        if OF_VALUES:
            total = tl.dot(p.to(do.dtype), do, total)
        else:
            ds = p * (dp - tl.load(delta_base + first + columns_m)[None, :])
            total = tl.dot(ds.to(q.dtype), q, total)
    return total


@triton.jit
def key_gradient_tma_kernel(
    Q, K, V, DO, OUT, LSE_2, DELTA, scale, scale_log2, n, m, padded, d, heads, kv_heads, all_kv_heads,
    out_batch, out_head, out_row,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr, OF_VALUES: tl.constexpr,
):  # fmt: skip
    """Compute dV (``OF_VALUES``) or dK of BLOCK_N keys of one key-value head per program."""
    blocks = tl.cdiv(m, BLOCK_N)
    block, batch_head = block_and_head(blocks, all_kv_heads, HEADS_AT_ONCE)
    key = block * BLOCK_N  # under a causal mask the first keys have the most queries
    batch, kv_head, group = batch_head // kv_heads, batch_head % kv_heads, heads // kv_heads
    columns_m, columns_n, columns_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    keys = key + columns_n
    k = _rows(K, batch, kv_head, key, BLOCK_N, BLOCK_D)
    v = k
    if not OF_VALUES:
        v = _rows(V, batch, kv_head, key, BLOCK_N, BLOCK_D)
    total = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    begin, whole = 0, 0
    if CAUSAL:
        begin = tl.maximum(0, key - (m - n)) // BLOCK_M * BLOCK_M
        whole = tl.cdiv(tl.maximum(0, key + BLOCK_N - 1 - (m - n)), BLOCK_M) * BLOCK_M
        whole = tl.maximum(begin, tl.minimum(whole, tl.cdiv(n, BLOCK_M) * BLOCK_M))
    for member in range(0, group):
        head = kv_head * group + member
        row = (batch.to(tl.int64) * heads + head) * padded
        if CAUSAL:
            total = _key_tiles(
                total, k, v, Q, DO, LSE_2 + row, DELTA + row, batch, head, begin, whole, keys, columns_m, n,
                m, scale_log2, BLOCK_M, BLOCK_D, True, OF_VALUES,
            )  # fmt: skip
        total = _key_tiles(
            total, k, v, Q, DO, LSE_2 + row, DELTA + row, batch, head, whole, n, keys, columns_m, n, m,
            scale_log2, BLOCK_M, BLOCK_D, False, OF_VALUES,
        )  # fmt: skip
    if not OF_VALUES:
        total = total * scale
    base = OUT + batch.to(tl.int64) * out_batch + kv_head.to(tl.int64) * out_head
    _store_tile(base, total, key, columns_n, columns_d, out_row, 1, m, d)


@triton.jit
def _query_tiles(
    dq, q, do, lse, delta, K, V, batch, kv_head, start, stop, rows, columns_n, n, m, scale_log2,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Fold keys ``start`` to ``stop`` into the gradient of one block of queries."""
    for first in range(start, stop, BLOCK_N):
        k = _rows(K, batch, kv_head, first, BLOCK_N, BLOCK_D)
        scores = tl.dot(q, k.T)
        v = _rows(V, batch, kv_head, first, BLOCK_N, BLOCK_D)
        dp = tl.dot(do, v.T)
        p = tl.exp2(scores * scale_log2 - lse[:, None])
        if MASKED:
            keys = first + columns_n
            # Under a causal mask no valid row attends past the last key.
            visible = rows[:, None] + (m - n) >= keys[None, :] if CAUSAL else keys[None, :] < m
            p = tl.where(visible, p, 0.0)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    return dq


@triton.jit
def query_gradient_tma_kernel(
    Q, K, V, DO, DQ, LSE_2, DELTA, scale, scale_log2, n, m, padded, d, heads, all_heads, group,
    dq_batch, dq_head, dq_row,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Compute dQ of BLOCK_M query rows of one head per program; the longest rows (the last) start first."""
    blocks = tl.cdiv(n, BLOCK_M)
    block, batch_head = block_and_head(blocks, all_heads, HEADS_AT_ONCE)
    first = (blocks - 1 - block) * BLOCK_M
    batch, head = batch_head // heads, batch_head % heads
    kv_head = head // group
    columns_m, columns_n, columns_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    rows = first + columns_m
    q = _rows(Q, batch, head, first, BLOCK_M, BLOCK_D)
    do = _rows(DO, batch, head, first, BLOCK_M, BLOCK_D)
    at = batch_head.to(tl.int64) * padded + rows
    lse, delta = tl.load(LSE_2 + at), tl.load(DELTA + at)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    whole, stop = _key_range(first, n, m, BLOCK_M, BLOCK_N, CAUSAL)
    dq = _query_tiles(
        dq, q, do, lse, delta, K, V, batch, kv_head, 0, whole, rows, columns_n, n, m, scale_log2, BLOCK_N,
        BLOCK_D, False, CAUSAL,
    )  # fmt: skip
    dq = _query_tiles(
        dq, q, do, lse, delta, K, V, batch, kv_head, whole, stop, rows, columns_n, n, m, scale_log2, BLOCK_N,
        BLOCK_D, True, CAUSAL,
    )  # fmt: skip
    base = DQ + batch.to(tl.int64) * dq_batch + head.to(tl.int64) * dq_head
    _store_tile(base, dq * scale, first, columns_m, columns_d, dq_row, 1, n, d)
