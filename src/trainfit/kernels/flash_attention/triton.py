"""FlashAttention-2 (Dao 2023, arXiv:2307.08691) in Triton: forward, and backward in three kernels.

Shapes: b batch, h query heads, k key-value heads (h a multiple of k), n queries, m keys, d head size. Row
sums and maxima are in base 2 (exp2 is a hardware instruction), the stored ``lse`` in base e. With ``CAUSAL``
query i attends to keys up to i + m - n, as in FlashAttention 2.1; a row without keys gives zeros and an
``lse`` of -inf. The scale is positive. The backward reads two fp32 values per row: ``lse`` in base 2 and
``delta``, the row sum of dO * O.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def block_and_head(blocks, all_heads, HEADS_AT_ONCE: tl.constexpr):
    """Return the program's block and head.

    HEADS_AT_ONCE heads run at a time, so that their keys stay in the L2 cache; programs of the same block of
    these heads are adjacent.
    """
    program = tl.program_id(0)
    first = program // (HEADS_AT_ONCE * blocks) * HEADS_AT_ONCE
    num_heads = tl.minimum(HEADS_AT_ONCE, all_heads - first)
    index = program - first * blocks
    return index // num_heads, first + index % num_heads


@triton.jit
def _tile_pointers(base, first, rows, columns, row_stride, column_stride):
    """Return the pointers of a tile from row ``first`` on; only the offset of ``first`` needs 64 bits."""
    offsets = rows[:, None] * row_stride + columns[None, :] * column_stride
    return base + tl.cast(first, tl.int64) * row_stride + offsets


@triton.jit
def load_tile(
    base, first, rows, columns, row_stride: tl.constexpr, column_stride, num_rows, num_columns,
    ALL_ROWS: tl.constexpr, ALL_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Load a tile from row ``first`` on, with zeros outside."""
    at = _tile_pointers(base, first, rows, columns, row_stride, column_stride)
    if ALL_ROWS and ALL_COLUMNS:
        return tl.load(at)
    inside = (first + rows < num_rows)[:, None]
    if not ALL_COLUMNS:
        inside = inside & (columns < num_columns)[None, :]
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def _store_tile(base, tile, first, rows, columns, row_stride, column_stride, num_rows, num_columns):
    at = _tile_pointers(base, first, rows, columns, row_stride, column_stride)
    inside = (first + rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    tl.store(at, tile.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _key_range(first, n, m, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr):
    """Return the ends of the key tiles that need no mask, and of those that any row attends to."""
    stop = m
    whole = m // BLOCK_N * BLOCK_N
    if CAUSAL:
        stop = tl.minimum(m, tl.maximum(0, first + BLOCK_M + (m - n)))
        whole = tl.maximum(0, tl.minimum(first + (m - n) + 1, m)) // BLOCK_N * BLOCK_N
    return whole, stop


@triton.jit
def _forward_tiles(
    acc, row_sum, row_max, q, k_base, v_base, start, stop, rows, columns_n, columns_d,
    k_row: tl.constexpr, k_column, v_row: tl.constexpr, v_column, n, m, d, scale_log2, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, ALL_KEYS: tl.constexpr, CAUSAL: tl.constexpr, EVEN_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold keys ``start`` to ``stop`` into the running output, sum and maximum of the query rows.

    ``MASKED``: not every row attends to them; without ``ALL_KEYS`` the last tile is partial.
    """
    for first in range(start, stop, BLOCK_N):
        k = load_tile(
            k_base, first, columns_n, columns_d, k_row, k_column, m, d, ALL_KEYS or not MASKED, EVEN_D
        )
        scores = tl.dot(q, k.T, input_precision=PRECISION)
        if MASKED:
            keys = first + columns_n
            # Under a causal mask no valid row attends past the last key.
            visible = rows[:, None] + (m - n) >= keys[None, :] if CAUSAL else keys[None, :] < m
            scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        offset = new_max
        if MASKED:
            # A row without a key so far: exp2(-inf - 0) is 0, exp2(-inf - -inf) is NaN.
            offset = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp2(scores * scale_log2 - offset[:, None])
        shrink = tl.exp2(row_max - offset)
        row_sum = row_sum * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        v = load_tile(
            v_base, first, columns_n, columns_d, v_row, v_column, m, d, ALL_KEYS or not MASKED, EVEN_D
        )
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        row_max = new_max
    return acc, row_sum, row_max


@triton.jit
def attention_forward_kernel(
    Q, K, V, OUT, LSE, scale_log2, n, m, d, heads, all_heads, group,
    q_batch, q_head, q_row: tl.constexpr, q_column, k_batch, k_head, k_row: tl.constexpr, k_column,
    v_batch, v_head, v_row: tl.constexpr, v_column, o_batch, o_head, o_row, o_column,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, EVEN_D: tl.constexpr, PRECISION: tl.constexpr, HEADS_AT_ONCE: tl.constexpr,
    ALL_KEYS: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M query rows of one head per program; the longest rows (the last) start first."""
    blocks = tl.cdiv(n, BLOCK_M)
    block, batch_head = block_and_head(blocks, all_heads, HEADS_AT_ONCE)
    first = (blocks - 1 - block) * BLOCK_M
    batch, head = (batch_head // heads).to(tl.int64), (batch_head % heads).to(tl.int64)
    kv_head = head // group
    k_base, v_base = K + batch * k_batch + kv_head * k_head, V + batch * v_batch + kv_head * v_head
    columns_m, columns_n, columns_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    rows = first + columns_m
    q_base = Q + batch * q_batch + head * q_head
    q = load_tile(q_base, first, columns_m, columns_d, q_row, q_column, n, d, False, EVEN_D)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    # Keys that every row of the block attends to, then those that need a mask.
    whole, stop = _key_range(first, n, m, BLOCK_M, BLOCK_N, CAUSAL)
    acc, row_sum, row_max = _forward_tiles(
        acc, row_sum, row_max, q, k_base, v_base, 0, whole, rows, columns_n, columns_d, k_row, k_column,
        v_row, v_column, n, m, d, scale_log2, BLOCK_N, False, ALL_KEYS, CAUSAL, EVEN_D, PRECISION,
    )  # fmt: skip
    acc, row_sum, row_max = _forward_tiles(
        acc, row_sum, row_max, q, k_base, v_base, whole, stop, rows, columns_n, columns_d, k_row, k_column,
        v_row, v_column, n, m, d, scale_log2, BLOCK_N, True, ALL_KEYS, CAUSAL, EVEN_D, PRECISION,
    )  # fmt: skip
    none = row_sum == 0.0
    acc = acc / tl.where(none, 1.0, row_sum)[:, None]
    lse = tl.where(none, float("-inf"), (row_max + tl.log2(tl.where(none, 1.0, row_sum))) * LN_2)
    tl.store(LSE + batch_head.to(tl.int64) * n + rows, lse, mask=rows < n)
    _store_tile(
        OUT + batch * o_batch + head * o_head, acc, first, columns_m, columns_d, o_row, o_column, n, d
    )


@triton.jit
def first_row_and_head(padded, BLOCK_M: tl.constexpr):
    """Return the program's first row and its head, counted over all batches.

    The grid has one axis, because the others end at 65,535, fewer than the heads of a batch of short
    sequences.
    """
    blocks = padded // BLOCK_M
    return tl.program_id(0) % blocks * BLOCK_M, tl.program_id(0) // blocks


@triton.jit
def attention_prepare_kernel(
    OUT, DO, LSE, LSE_2, DELTA, n, padded, d, heads,
    o_batch, o_head, o_row: tl.constexpr, o_column, do_batch, do_head, do_row: tl.constexpr, do_column,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, EVEN_D: tl.constexpr,
):  # fmt: skip
    """Compute delta, the row sum of dO * O, and ``lse`` in base 2, both padded to whole tiles.

    Rows past the end, and rows without keys, get an ``lse`` of infinity, which makes their probabilities 0.
    """
    first, batch_head = first_row_and_head(padded, BLOCK_M)  # pyright: ignore[reportGeneralTypeIssues]
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
def _key_tiles(
    dk, dv, k, v, q_base, do_base, lse_base, delta_base, start, stop, keys, columns_m, columns_d,
    q_row: tl.constexpr, q_column, do_row: tl.constexpr, do_column, n, m, d, scale_log2,
    BLOCK_M: tl.constexpr, MASKED: tl.constexpr, EVEN_D: tl.constexpr, PRECISION: tl.constexpr,
    ALL_ROWS: tl.constexpr,
):  # fmt: skip
    """Fold query rows ``start`` to ``stop`` into the gradients of one block of keys and values.

    ``MASKED``: not every row attends to every key; without ``ALL_ROWS`` the last tile is partial. Scores are
    [keys, rows], so P and dS are the register operands of the products for dV and dK.
    """
    for first in range(start, stop, BLOCK_M):
        q = load_tile(q_base, first, columns_m, columns_d, q_row, q_column, n, d, ALL_ROWS, EVEN_D)
        lse = tl.load(lse_base + first + columns_m)
        scores = tl.dot(k, q.T, input_precision=PRECISION)
        do = load_tile(do_base, first, columns_m, columns_d, do_row, do_column, n, d, ALL_ROWS, EVEN_D)
        dp = tl.dot(v, do.T, input_precision=PRECISION)
        p = tl.exp2(scores * scale_log2 - lse[None, :])
        if MASKED:
            p = tl.where((first + columns_m)[None, :] + (m - n) >= keys[:, None], p, 0.0)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
        delta = tl.load(delta_base + first + columns_m)
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def key_gradient_kernel(
    Q, K, V, DO, LSE_2, DELTA, DK, DV, scale, scale_log2, n, m, padded, d, heads, kv_heads, all_kv_heads,
    q_batch, q_head, q_row: tl.constexpr, q_column, k_batch, k_head, k_row: tl.constexpr, k_column,
    v_batch, v_head, v_row: tl.constexpr, v_column, do_batch, do_head, do_row: tl.constexpr, do_column,
    dk_batch, dk_head, dk_row, dk_column, dv_batch, dv_head, dv_row, dv_column,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, EVEN_D: tl.constexpr, PRECISION: tl.constexpr, HEADS_AT_ONCE: tl.constexpr,
    ALL_ROWS: tl.constexpr,
):  # fmt: skip
    """Compute dK and dV of BLOCK_N keys of one key-value head per program, over all of its query heads."""
    blocks = tl.cdiv(m, BLOCK_N)
    block, batch_head = block_and_head(blocks, all_kv_heads, HEADS_AT_ONCE)
    key = block * BLOCK_N  # under a causal mask the first keys have the most queries
    batch, kv_head, group = (
        (batch_head // kv_heads).to(tl.int64), (batch_head % kv_heads).to(tl.int64), heads // kv_heads
    )  # fmt: skip
    columns_m, columns_n, columns_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    keys = key + columns_n
    k_base, v_base = K + batch * k_batch + kv_head * k_head, V + batch * v_batch + kv_head * v_head
    k = load_tile(k_base, key, columns_n, columns_d, k_row, k_column, m, d, False, EVEN_D)
    v = load_tile(v_base, key, columns_n, columns_d, v_row, v_column, m, d, False, EVEN_D)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    # Rows that attend to some of these keys, then rows that attend to all. Keys past the end affect only
    # their own gradients, which are not stored.
    begin, whole = 0, 0
    if CAUSAL:
        begin = tl.maximum(0, key - (m - n)) // BLOCK_M * BLOCK_M
        whole = tl.cdiv(tl.maximum(0, key + BLOCK_N - 1 - (m - n)), BLOCK_M) * BLOCK_M
        whole = tl.maximum(begin, tl.minimum(whole, tl.cdiv(n, BLOCK_M) * BLOCK_M))
    for member in range(0, group):
        head = kv_head * group + member
        row = (batch * heads + head) * padded
        q_base, do_base = Q + batch * q_batch + head * q_head, DO + batch * do_batch + head * do_head
        if CAUSAL:
            dk, dv = _key_tiles(
                dk, dv, k, v, q_base, do_base, LSE_2 + row, DELTA + row, begin, whole, keys, columns_m,
                columns_d,
                q_row, q_column, do_row, do_column, n, m, d, scale_log2, BLOCK_M, True, EVEN_D, PRECISION,
                ALL_ROWS,
            )  # fmt: skip
        dk, dv = _key_tiles(
            dk, dv, k, v, q_base, do_base, LSE_2 + row, DELTA + row, whole, n, keys, columns_m, columns_d,
            q_row, q_column, do_row, do_column, n, m, d, scale_log2, BLOCK_M, False, EVEN_D, PRECISION,
            ALL_ROWS,
        )  # fmt: skip
    dk_base, dv_base = DK + batch * dk_batch + kv_head * dk_head, DV + batch * dv_batch + kv_head * dv_head
    _store_tile(dk_base, dk * scale, key, columns_n, columns_d, dk_row, dk_column, m, d)
    _store_tile(dv_base, dv, key, columns_n, columns_d, dv_row, dv_column, m, d)


@triton.jit
def _query_tiles(
    dq, q, do, lse, delta, k_base, v_base, start, stop, rows, columns_n, columns_d,
    k_row: tl.constexpr, k_column, v_row: tl.constexpr, v_column, n, m, d, scale_log2,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, EVEN_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold keys ``start`` to ``stop`` into the gradient of one block of queries (see ``_forward_tiles``)."""
    for first in range(start, stop, BLOCK_N):
        k = load_tile(k_base, first, columns_n, columns_d, k_row, k_column, m, d, not MASKED, EVEN_D)
        scores = tl.dot(q, k.T, input_precision=PRECISION)
        v = load_tile(v_base, first, columns_n, columns_d, v_row, v_column, m, d, not MASKED, EVEN_D)
        dp = tl.dot(do, v.T, input_precision=PRECISION)
        p = tl.exp2(scores * scale_log2 - lse[:, None])
        if MASKED:
            keys = first + columns_n
            # Under a causal mask no valid row attends past the last key.
            visible = rows[:, None] + (m - n) >= keys[None, :] if CAUSAL else keys[None, :] < m
            p = tl.where(visible, p, 0.0)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit
def query_gradient_kernel(
    Q, K, V, DO, LSE_2, DELTA, DQ, scale, scale_log2, n, m, padded, d, heads, all_heads, group,
    q_batch, q_head, q_row: tl.constexpr, q_column, k_batch, k_head, k_row: tl.constexpr, k_column,
    v_batch, v_head, v_row: tl.constexpr, v_column, do_batch, do_head, do_row: tl.constexpr, do_column,
    dq_batch, dq_head, dq_row, dq_column,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, EVEN_D: tl.constexpr, PRECISION: tl.constexpr, HEADS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Compute dQ of BLOCK_M query rows of one head per program; the longest rows (the last) start first."""
    blocks = tl.cdiv(n, BLOCK_M)
    block, batch_head = block_and_head(blocks, all_heads, HEADS_AT_ONCE)
    first = (blocks - 1 - block) * BLOCK_M
    batch, head = (batch_head // heads).to(tl.int64), (batch_head % heads).to(tl.int64)
    kv_head = head // group
    k_base, v_base = K + batch * k_batch + kv_head * k_head, V + batch * v_batch + kv_head * v_head
    columns_m, columns_n, columns_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    rows = first + columns_m
    q_base, do_base = Q + batch * q_batch + head * q_head, DO + batch * do_batch + head * do_head
    q = load_tile(q_base, first, columns_m, columns_d, q_row, q_column, n, d, False, EVEN_D)
    do = load_tile(do_base, first, columns_m, columns_d, do_row, do_column, n, d, False, EVEN_D)
    at = batch_head.to(tl.int64) * padded + rows
    lse, delta = tl.load(LSE_2 + at), tl.load(DELTA + at)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    whole, stop = _key_range(first, n, m, BLOCK_M, BLOCK_N, CAUSAL)
    dq = _query_tiles(
        dq, q, do, lse, delta, k_base, v_base, 0, whole, rows, columns_n, columns_d,
        k_row, k_column, v_row, v_column, n, m, d, scale_log2, BLOCK_N, False, CAUSAL, EVEN_D, PRECISION,
    )  # fmt: skip
    dq = _query_tiles(
        dq, q, do, lse, delta, k_base, v_base, whole, stop, rows, columns_n, columns_d,
        k_row, k_column, v_row, v_column, n, m, d, scale_log2, BLOCK_N, True, CAUSAL, EVEN_D, PRECISION,
    )  # fmt: skip
    dq_base = DQ + batch * dq_batch + head * dq_head
    _store_tile(dq_base, dq * scale, first, columns_m, columns_d, dq_row, dq_column, n, d)
