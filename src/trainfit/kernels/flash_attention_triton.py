"""FlashAttention-2 (Dao 2023, arXiv:2307.08691) in Triton: forward, and backward in three kernels.

Shapes: b batch, h query heads, k key-value heads (h a multiple of k), n queries, m keys, d head size. Row sums and
maxima are kept in base 2 (exp2 is the hardware's own), ``lse`` leaves in base e. With ``CAUSAL`` query i sees the keys
up to i + m - n (the last query sees all), as in FlashAttention 2.1; a row that sees none gives zeros and lse -inf.

Nothing of size n x m exists: the forward keeps the output and one fp32 ``lse`` a row; the backward adds one fp32
``delta`` a row (equation 4 there: the row sum of dO * O).
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _tile(pointer, rows, columns, row_stride, column_stride, num_rows, num_columns, EVEN: tl.constexpr):
    """Rows x columns from memory, zeros outside; EVEN: the columns are all there."""
    at = pointer + rows[:, None] * row_stride + columns[None, :] * column_stride
    if EVEN:
        return tl.load(at, mask=rows[:, None] < num_rows, other=0.0)
    return tl.load(at, mask=(rows[:, None] < num_rows) & (columns[None, :] < num_columns), other=0.0)


@triton.jit
def _put(pointer, tile, rows, columns, row_stride, column_stride, num_rows, num_columns):
    at = pointer + rows[:, None] * row_stride + columns[None, :] * column_stride
    tl.store(
        at,
        tile.to(pointer.dtype.element_ty),
        mask=(rows[:, None] < num_rows) & (columns[None, :] < num_columns),
    )


@triton.jit
def _forward_tiles(
    acc, row_sum, row_max, q, k_base, v_base, start, stop, rows, columns_n, columns_d,
    k_row, k_column, v_row, v_column, n, m, d, scale_log2,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, EVEN_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys ``start`` to ``stop`` folded into the running output, sum and maximum of the query rows."""
    for first in range(start, stop, BLOCK_N):
        keys = first + columns_n
        k = _tile(k_base, keys, columns_d, k_row, k_column, m, d, EVEN_D)
        scores = tl.dot(q, k.T, input_precision=PRECISION) * scale_log2
        if MASKED:
            seen = keys[None, :] < m
            if CAUSAL:
                seen = seen & (rows[:, None] + (m - n) >= keys[None, :])
            scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # A row that has seen nothing yet: exp2(-inf - 0) is 0, exp2(-inf - -inf) would be no number.
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp2(scores - safe_max[:, None])
        shrink = tl.exp2(row_max - safe_max)
        row_sum = row_sum * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        v = _tile(v_base, keys, columns_d, v_row, v_column, m, d, EVEN_D)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        row_max = new_max
    return acc, row_sum, row_max


@triton.jit
def forward_kernel(
    Q, K, V, OUT, LSE, scale_log2, n, m, d, heads, group,
    q_batch, q_head, q_row, q_column, k_batch, k_head, k_row, k_column,
    v_batch, v_head, v_row, v_column, o_batch, o_head, o_row, o_column,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, EVEN_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M query rows of one head. The longest rows (the last) start first."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    batch = batch.to(tl.int64)
    q_base = Q + batch * q_batch + head.to(tl.int64) * q_head
    k_base = K + batch * k_batch + (head // group).to(tl.int64) * k_head
    v_base = V + batch * v_batch + (head // group).to(tl.int64) * v_head
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    columns_n, columns_d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    q = _tile(q_base, rows, columns_d, q_row, q_column, n, d, EVEN_D)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    # Keys that every row of the block sees, then those that need a mask.
    if CAUSAL:
        stop = tl.minimum(m, tl.maximum(0, (block + 1) * BLOCK_M + (m - n)))
        whole = tl.maximum(0, tl.minimum(block * BLOCK_M + (m - n) + 1, m)) // BLOCK_N * BLOCK_N
    else:
        stop = m
        whole = m // BLOCK_N * BLOCK_N
    acc, row_sum, row_max = _forward_tiles(
        acc, row_sum, row_max, q, k_base, v_base, 0, whole, rows, columns_n, columns_d,
        k_row, k_column, v_row, v_column, n, m, d, scale_log2, BLOCK_N, False, CAUSAL, EVEN_D, PRECISION,
    )  # fmt: skip
    acc, row_sum, row_max = _forward_tiles(
        acc, row_sum, row_max, q, k_base, v_base, whole, stop, rows, columns_n, columns_d,
        k_row, k_column, v_row, v_column, n, m, d, scale_log2, BLOCK_N, True, CAUSAL, EVEN_D, PRECISION,
    )  # fmt: skip
    none = row_sum == 0.0
    acc = acc / tl.where(none, 1.0, row_sum)[:, None]
    lse = tl.where(none, float("-inf"), (row_max + tl.log2(tl.where(none, 1.0, row_sum))) * LN_2)
    tl.store(LSE + tl.program_id(1).to(tl.int64) * n + rows, lse, mask=rows < n)
    o_base = OUT + batch * o_batch + head.to(tl.int64) * o_head
    _put(o_base, acc, rows, columns_d, o_row, o_column, n, d)


@triton.jit
def delta_kernel(
    OUT, DO, DELTA, n, d, heads, o_batch, o_head, o_row, o_column, do_batch, do_head, do_row, do_column,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """delta = row sum of dO * O, fp32."""
    batch, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    rows, columns = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    o = _tile(OUT + batch * o_batch + head * o_head, rows, columns, o_row, o_column, n, d, False)
    do = _tile(DO + batch * do_batch + head * do_head, rows, columns, do_row, do_column, n, d, False)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(DELTA + tl.program_id(1).to(tl.int64) * n + rows, delta, mask=rows < n)


@triton.jit
def _probabilities(scores, lse, rows, keys, n, m, scale_log2, MASKED: tl.constexpr, CAUSAL: tl.constexpr):
    """softmax(scores) from the kept ``lse`` ([rows, keys]); rows without keys, and what is masked, give 0."""
    lse = tl.where(lse == float("-inf"), 0.0, lse)
    p = tl.exp2(scores * scale_log2 - (lse * LOG2_E)[:, None])
    if MASKED:
        seen = (keys[None, :] < m) & (rows[:, None] < n)
        if CAUSAL:
            seen = seen & (rows[:, None] + (m - n) >= keys[None, :])
        p = tl.where(seen, p, 0.0)
    return p


@triton.jit
def _key_tiles(
    dk, dv, k, v, q_base, do_base, lse_base, delta_base, start, stop, keys, columns_m, columns_d,
    q_row, q_column, do_row, do_column, n, m, d, scale_log2,
    BLOCK_M: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, EVEN_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Query rows ``start`` to ``stop`` folded into the gradients of one block of keys and values."""
    for first in range(start, stop, BLOCK_M):
        rows = first + columns_m
        q = _tile(q_base, rows, columns_d, q_row, q_column, n, d, EVEN_D)
        do = _tile(do_base, rows, columns_d, do_row, do_column, n, d, EVEN_D)
        lse = tl.load(lse_base + rows, mask=rows < n, other=0.0)
        delta = tl.load(delta_base + rows, mask=rows < n, other=0.0)
        scores = tl.dot(q, k.T, input_precision=PRECISION)
        p = _probabilities(scores, lse, rows, keys, n, m, scale_log2, MASKED, CAUSAL)
        dv = tl.dot(p.to(do.dtype).T, do, dv, input_precision=PRECISION)
        dp = tl.dot(do, v.T, input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        dk = tl.dot(ds.to(q.dtype).T, q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def key_gradient_kernel(
    Q, K, V, DO, LSE, DELTA, DK, DV, scale, scale_log2, n, m, d, heads, group,
    q_batch, q_head, q_row, q_column, k_batch, k_head, k_row, k_column,
    v_batch, v_head, v_row, v_column, do_batch, do_head, do_row, do_column,
    dk_batch, dk_head, dk_row, dk_column, dv_batch, dv_head, dv_row, dv_column,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, EVEN_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: dK and dV of BLOCK_N keys of one key-value head, over all query heads that read it."""
    block, kv_heads = tl.program_id(0), heads // group
    batch, kv_head = (tl.program_id(1) // kv_heads).to(tl.int64), (tl.program_id(1) % kv_heads).to(tl.int64)
    keys = block * BLOCK_N + tl.arange(0, BLOCK_N)
    columns_m, columns_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    k = _tile(K + batch * k_batch + kv_head * k_head, keys, columns_d, k_row, k_column, m, d, EVEN_D)
    v = _tile(V + batch * v_batch + kv_head * v_head, keys, columns_d, v_row, v_column, m, d, EVEN_D)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    # Rows that see part of these keys, then rows that see them all.
    begin, whole = 0, 0
    if CAUSAL:
        begin = tl.maximum(0, block * BLOCK_N - (m - n)) // BLOCK_M * BLOCK_M
        whole = tl.maximum(0, (block + 1) * BLOCK_N - 1 - (m - n))
        whole = tl.minimum(begin + (whole - begin + BLOCK_M - 1) // BLOCK_M * BLOCK_M, n)
        whole = tl.maximum(whole, begin)
    last_whole = tl.maximum(whole, whole + (n - whole) // BLOCK_M * BLOCK_M)
    if (block + 1) * BLOCK_N > m:
        whole = tl.maximum(begin, n)  # the last block of keys is not full: all its rows need the mask
        last_whole = whole
    for member in range(0, group):
        head = kv_head * group + member
        row = batch * heads + head
        q_base, do_base = Q + batch * q_batch + head * q_head, DO + batch * do_batch + head * do_head
        lse_base, delta_base = LSE + row * n, DELTA + row * n
        dk, dv = _key_tiles(
            dk, dv, k, v, q_base, do_base, lse_base, delta_base, begin, whole, keys, columns_m, columns_d,
            q_row, q_column, do_row, do_column, n, m, d, scale_log2, BLOCK_M, True, CAUSAL, EVEN_D, PRECISION,
        )  # fmt: skip
        dk, dv = _key_tiles(
            dk, dv, k, v, q_base, do_base, lse_base, delta_base, whole, last_whole, keys, columns_m, columns_d,
            q_row, q_column, do_row, do_column, n, m, d, scale_log2, BLOCK_M, False, CAUSAL, EVEN_D, PRECISION,
        )  # fmt: skip
        dk, dv = _key_tiles(
            dk, dv, k, v, q_base, do_base, lse_base, delta_base, last_whole, n, keys, columns_m, columns_d,
            q_row, q_column, do_row, do_column, n, m, d, scale_log2, BLOCK_M, True, CAUSAL, EVEN_D, PRECISION,
        )  # fmt: skip
    _put(DK + batch * dk_batch + kv_head * dk_head, dk * scale, keys, columns_d, dk_row, dk_column, m, d)
    _put(DV + batch * dv_batch + kv_head * dv_head, dv, keys, columns_d, dv_row, dv_column, m, d)


@triton.jit
def _query_tiles(
    dq, q, do, lse, delta, k_base, v_base, start, stop, rows, columns_n, columns_d,
    k_row, k_column, v_row, v_column, n, m, d, scale_log2,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, EVEN_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys ``start`` to ``stop`` folded into the gradient of one block of queries."""
    for first in range(start, stop, BLOCK_N):
        keys = first + columns_n
        k = _tile(k_base, keys, columns_d, k_row, k_column, m, d, EVEN_D)
        v = _tile(v_base, keys, columns_d, v_row, v_column, m, d, EVEN_D)
        scores = tl.dot(q, k.T, input_precision=PRECISION)
        p = _probabilities(scores, lse, rows, keys, n, m, scale_log2, MASKED, CAUSAL)
        dp = tl.dot(do, v.T, input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit
def query_gradient_kernel(
    Q, K, V, DO, LSE, DELTA, DQ, scale, scale_log2, n, m, d, heads, group,
    q_batch, q_head, q_row, q_column, k_batch, k_head, k_row, k_column,
    v_batch, v_head, v_row, v_column, do_batch, do_head, do_row, do_column,
    dq_batch, dq_head, dq_row, dq_column,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, EVEN_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: dQ of BLOCK_M query rows of one head."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    batch, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    columns_n, columns_d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    q = _tile(Q + batch * q_batch + head * q_head, rows, columns_d, q_row, q_column, n, d, EVEN_D)
    do = _tile(DO + batch * do_batch + head * do_head, rows, columns_d, do_row, do_column, n, d, EVEN_D)
    at = tl.program_id(1).to(tl.int64) * n + rows
    lse, delta = tl.load(LSE + at, mask=rows < n, other=0.0), tl.load(DELTA + at, mask=rows < n, other=0.0)
    k_base, v_base = (
        K + batch * k_batch + head // group * k_head,
        V + batch * v_batch + head // group * v_head,
    )
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if CAUSAL:
        stop = tl.minimum(m, tl.maximum(0, (block + 1) * BLOCK_M + (m - n)))
        whole = tl.maximum(0, tl.minimum(block * BLOCK_M + (m - n) + 1, m)) // BLOCK_N * BLOCK_N
    else:
        stop = m
        whole = m // BLOCK_N * BLOCK_N
    dq = _query_tiles(
        dq, q, do, lse, delta, k_base, v_base, 0, whole, rows, columns_n, columns_d,
        k_row, k_column, v_row, v_column, n, m, d, scale_log2, BLOCK_N, False, CAUSAL, EVEN_D, PRECISION,
    )  # fmt: skip
    dq = _query_tiles(
        dq, q, do, lse, delta, k_base, v_base, whole, stop, rows, columns_n, columns_d,
        k_row, k_column, v_row, v_column, n, m, d, scale_log2, BLOCK_N, True, CAUSAL, EVEN_D, PRECISION,
    )  # fmt: skip
    _put(DQ + batch * dq_batch + head * dq_head, dq * scale, rows, columns_d, dq_row, dq_column, n, d)
