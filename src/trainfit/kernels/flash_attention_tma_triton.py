"""FlashAttention for Hopper in Triton: tiles come and go by TMA, and the backward makes dK, dV and dQ in one pass.

Triton 3.6 and 3.7 ignore ``warp_specialize`` on sm_90 (the PTX is the same with it), so it is not asked for.

Shapes as in flash_attention_triton.py: b batch, h query heads, k key-value heads, n queries, m keys, d head size. Q, K, V,
O, dO, dK, dV and dQ are tensor descriptors [b, heads, rows, d] with blocks [1, 1, rows, BLOCK_D]: the hardware gives zeros
outside and drops what is written there, so no tile needs a mask of its own. The scale is positive.

The backward works on transposed scores [keys, queries], so that P and dS are the register operand of the products for dV
and dK (Shah et al. 2024, FlashAttention-3, arXiv:2407.08608, section 3). With ``WITH_DQ`` dQ is added in fp32 in memory:
five products instead of seven, but sums in another order each time. Without it ``query_gradient_tma_kernel`` makes it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from trainfit.kernels.flash_attention_triton import LN_2, LOG2_E, block_and_head


@triton.jit
def _load(descriptor, batch, head, row, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    return descriptor.load([batch, head, row, 0]).reshape(ROWS, BLOCK_D)


@triton.jit
def _store(descriptor, batch, head, row, tile, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    descriptor.store([batch, head, row, 0], tile.to(descriptor.dtype).reshape(1, 1, ROWS, BLOCK_D))


@triton.jit
def _forward_range(
    acc, row_sum, row_max, q, K, V, batch, kv_head, start, stop, rows, n, m, scale_log2,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Keys ``start`` to ``stop`` folded into the running output, sum and maximum of the query rows."""
    for first in range(start, stop, BLOCK_N):
        k = _load(K, batch, kv_head, first, BLOCK_N, BLOCK_D)
        scores = tl.dot(q, k.T)
        if MASKED:
            keys = first + tl.arange(0, BLOCK_N)
            seen = keys[None, :] < m
            if CAUSAL:
                seen = seen & (rows[:, None] + (m - n) >= keys[None, :])
            scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        offset = new_max
        if (
            MASKED
        ):  # a row that has seen nothing yet: exp2(-inf - 0) is 0, exp2(-inf - -inf) would be no number
            offset = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp2(scores * scale_log2 - offset[:, None])
        shrink = tl.exp2(row_max - offset)
        row_sum = row_sum * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        v = _load(V, batch, kv_head, first, BLOCK_N, BLOCK_D)
        acc = tl.dot(p.to(v.dtype), v, acc)
        row_max = new_max
    return acc, row_sum, row_max


@triton.jit
def forward_tma_kernel(
    Q, K, V, OUT, LSE, scale_log2, n, m, heads, all_heads, group,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M query rows of one head. The longest rows (the last) start first."""
    blocks = tl.cdiv(n, BLOCK_M)
    place, batch_head = block_and_head(blocks, all_heads, HEADS_AT_ONCE)
    first = (blocks - 1 - place) * BLOCK_M
    batch, head = batch_head // heads, batch_head % heads
    kv_head = head // group
    rows = first + tl.arange(0, BLOCK_M)
    q = _load(Q, batch, head, first, BLOCK_M, BLOCK_D)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    # Keys that every row of the block sees, then those that need a mask.
    if CAUSAL:
        stop = tl.minimum(m, tl.maximum(0, first + BLOCK_M + (m - n)))
        whole = tl.maximum(0, tl.minimum(first + (m - n) + 1, m)) // BLOCK_N * BLOCK_N
    else:
        stop = m
        whole = m // BLOCK_N * BLOCK_N
    acc, row_sum, row_max = _forward_range(
        acc, row_sum, row_max, q, K, V, batch, kv_head, 0, whole, rows, n, m, scale_log2,
        BLOCK_N, BLOCK_D, False, CAUSAL,
    )  # fmt: skip
    acc, row_sum, row_max = _forward_range(
        acc, row_sum, row_max, q, K, V, batch, kv_head, whole, stop, rows, n, m, scale_log2,
        BLOCK_N, BLOCK_D, True, CAUSAL,
    )  # fmt: skip
    none = row_sum == 0.0
    acc = acc / tl.where(none, 1.0, row_sum)[:, None]
    lse = tl.where(none, float("-inf"), (row_max + tl.log2(tl.where(none, 1.0, row_sum))) * LN_2)
    tl.store(LSE + batch_head.to(tl.int64) * n + rows, lse, mask=rows < n)
    _store(OUT, batch, head, first, acc, BLOCK_M, BLOCK_D)


@triton.jit
def prepare_tma_kernel(
    OUT, DO, DQ, LSE, LSE_2, DELTA, n, padded, heads,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, WITH_DQ: tl.constexpr,
):  # fmt: skip
    """delta = row sum of dO * O and ``lse`` in base 2, both padded to whole tiles; zeros in dQ's sums.

    Rows that do not exist, or see no key, get an ``lse`` of infinity: their probabilities come out as 0.
    """
    first = tl.program_id(0) * BLOCK_M
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    rows = first + tl.arange(0, BLOCK_M)
    out = _load(OUT, batch, head, first, BLOCK_M, BLOCK_D)
    do = _load(DO, batch, head, first, BLOCK_M, BLOCK_D)
    lse = tl.load(LSE + tl.program_id(1).to(tl.int64) * n + rows, mask=rows < n, other=float("-inf"))
    at = tl.program_id(1).to(tl.int64) * padded + rows
    tl.store(LSE_2 + at, tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E))
    tl.store(DELTA + at, tl.sum(out.to(tl.float32) * do.to(tl.float32), 1))
    if WITH_DQ:
        _store(DQ, batch, head, first, tl.zeros((BLOCK_M, BLOCK_D), tl.float32), BLOCK_M, BLOCK_D)


@triton.jit
def _key_range(
    dk, dv, k, v, Q, DO, DQ, lse_base, delta_base, batch, head, start, stop, keys, n, m, scale_log2,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, WITH_DQ: tl.constexpr,
):  # fmt: skip
    """Query rows ``start`` to ``stop`` folded into the gradients of one block of keys and values."""
    for first in range(start, stop, BLOCK_M):
        rows = first + tl.arange(0, BLOCK_M)
        q = _load(Q, batch, head, first, BLOCK_M, BLOCK_D)
        lse = tl.load(lse_base + rows)
        scores = tl.dot(k, q.T)
        do = _load(DO, batch, head, first, BLOCK_M, BLOCK_D)
        dp = tl.dot(v, do.T)
        p = tl.exp2(scores * scale_log2 - lse[None, :])
        if MASKED:
            seen = (keys < m)[:, None]
            if CAUSAL:
                seen = seen & (rows[None, :] + (m - n) >= keys[:, None])
            p = tl.where(seen, p, 0.0)
        dv = tl.dot(p.to(do.dtype), do, dv)
        delta = tl.load(delta_base + rows)
        ds = (p * (dp - delta[None, :])).to(q.dtype)
        dk = tl.dot(ds, q, dk)
        if WITH_DQ:
            dq = tl.dot(ds.T, k)
            DQ.atomic_add([batch, head, first, 0], dq.reshape(1, 1, BLOCK_M, BLOCK_D))
    return dk, dv


@triton.jit
def key_gradient_tma_kernel(
    Q, K, V, DO, LSE_2, DELTA, DQ, DK, DV, scale, scale_log2, n, m, padded, heads, kv_heads, all_kv_heads,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr,
    WITH_DQ: tl.constexpr, HEADS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One program: dK and dV of BLOCK_N keys of one key-value head, over all query heads that read it."""
    blocks = tl.cdiv(m, BLOCK_N)
    place, batch_head = block_and_head(blocks, all_kv_heads, HEADS_AT_ONCE)
    key = place * BLOCK_N  # under a causal mask the first keys have the most queries
    batch, kv_head = batch_head // kv_heads, batch_head % kv_heads
    group = heads // kv_heads
    keys = key + tl.arange(0, BLOCK_N)
    k = _load(K, batch, kv_head, key, BLOCK_N, BLOCK_D)
    v = _load(V, batch, kv_head, key, BLOCK_N, BLOCK_D)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    # Rows that see part of these keys, then rows that see them all.
    begin, whole = 0, 0
    if CAUSAL:
        begin = tl.maximum(0, key - (m - n)) // BLOCK_M * BLOCK_M
        whole = tl.cdiv(tl.maximum(0, key + BLOCK_N - 1 - (m - n)), BLOCK_M) * BLOCK_M
        whole = tl.maximum(begin, tl.minimum(whole, n))
    if key + BLOCK_N > m:
        whole = tl.maximum(begin, n)  # keys that do not exist must not reach dQ
    for member in range(0, group):
        head = kv_head * group + member
        row = (batch * heads + head).to(tl.int64) * padded
        dk, dv = _key_range(
            dk, dv, k, v, Q, DO, DQ, LSE_2 + row, DELTA + row, batch, head, begin, whole, keys, n, m, scale_log2,
            BLOCK_M, BLOCK_D, True, CAUSAL, WITH_DQ,
        )  # fmt: skip
        dk, dv = _key_range(
            dk, dv, k, v, Q, DO, DQ, LSE_2 + row, DELTA + row, batch, head, whole, n, keys, n, m, scale_log2,
            BLOCK_M, BLOCK_D, False, CAUSAL, WITH_DQ,
        )  # fmt: skip
    _store(DK, batch, kv_head, key, dk * scale, BLOCK_N, BLOCK_D)
    _store(DV, batch, kv_head, key, dv, BLOCK_N, BLOCK_D)


@triton.jit
def _query_range(
    dq, q, do, lse, delta, K, V, batch, kv_head, start, stop, rows, n, m, scale_log2,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Keys ``start`` to ``stop`` folded into the gradient of one block of queries."""
    for first in range(start, stop, BLOCK_N):
        k = _load(K, batch, kv_head, first, BLOCK_N, BLOCK_D)
        scores = tl.dot(q, k.T)
        v = _load(V, batch, kv_head, first, BLOCK_N, BLOCK_D)
        dp = tl.dot(do, v.T)
        p = tl.exp2(scores * scale_log2 - lse[:, None])
        if MASKED:
            keys = first + tl.arange(0, BLOCK_N)
            seen = keys[None, :] < m
            if CAUSAL:
                seen = seen & (rows[:, None] + (m - n) >= keys[None, :])
            p = tl.where(seen, p, 0.0)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    return dq


@triton.jit
def query_gradient_tma_kernel(
    Q, K, V, DO, LSE_2, DELTA, DQ, scale, scale_log2, n, m, padded, heads, all_heads, group,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One program: dQ of BLOCK_M query rows of one head. The longest rows (the last) start first."""
    blocks = tl.cdiv(n, BLOCK_M)
    place, batch_head = block_and_head(blocks, all_heads, HEADS_AT_ONCE)
    first = (blocks - 1 - place) * BLOCK_M
    batch, head = batch_head // heads, batch_head % heads
    kv_head = head // group
    rows = first + tl.arange(0, BLOCK_M)
    q = _load(Q, batch, head, first, BLOCK_M, BLOCK_D)
    do = _load(DO, batch, head, first, BLOCK_M, BLOCK_D)
    at = batch_head.to(tl.int64) * padded + rows
    lse, delta = tl.load(LSE_2 + at), tl.load(DELTA + at)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if CAUSAL:
        stop = tl.minimum(m, tl.maximum(0, first + BLOCK_M + (m - n)))
        whole = tl.maximum(0, tl.minimum(first + (m - n) + 1, m)) // BLOCK_N * BLOCK_N
    else:
        stop = m
        whole = m // BLOCK_N * BLOCK_N
    dq = _query_range(
        dq, q, do, lse, delta, K, V, batch, kv_head, 0, whole, rows, n, m, scale_log2,
        BLOCK_N, BLOCK_D, False, CAUSAL,
    )  # fmt: skip
    dq = _query_range(
        dq, q, do, lse, delta, K, V, batch, kv_head, whole, stop, rows, n, m, scale_log2,
        BLOCK_N, BLOCK_D, True, CAUSAL,
    )  # fmt: skip
    _store(DQ, batch, head, first, dq * scale, BLOCK_M, BLOCK_D)
