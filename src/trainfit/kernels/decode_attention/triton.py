"""Decoding attention in Triton. A program reads a part of the keys and values of one key-value head of one
sequence, for all query heads that share it.

Example: a sequence of 1,000 positions, two parts, blocks of 64. Each part holds ceil(1000 / 2 / 64) = 8
blocks; part 0 reads positions 0 to 511, part 1 reads 512 to 999. Each keeps the largest score, the sum of
the exponentials and the weighted sum of values as it goes (online softmax), and writes its result with the
logarithm of its sum; ``combine_kernel`` weights the results by those.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decode_kernel(
    Q, K, V, LENGTHS, SLOPES, OUT, LOGS, kv_heads, group, d, m, window, scale,
    qb, qh, qd, kb, kh, km, kd, vb, vh, vm, vd, ob, oh, op, od,
    PARTS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
):  # fmt: skip
    """Write attention over one part; with one part, the result itself, else its logarithm too."""
    b = (tl.program_id(0) // kv_heads).to(tl.int64)
    head = (tl.program_id(0) % kv_heads).to(tl.int64)
    part = tl.program_id(1)
    rows, columns = tl.arange(0, GROUP), tl.arange(0, BLOCK_D)
    heads = head * group + rows
    inside = (rows < group)[:, None] & (columns < d)[None, :]
    length = tl.minimum(tl.load(LENGTHS + b).to(tl.int32), m)
    first = tl.maximum(length - window, 0) if window > 0 else 0
    # Blocks from the one that holds the first position on, dealt out evenly.
    begin = first // BLOCK
    blocks = tl.cdiv(tl.cdiv(length, BLOCK) - begin, PARTS)
    start = (begin + part * blocks) * BLOCK
    end = tl.minimum(length, start + blocks * BLOCK)
    q = tl.load(Q + b * qb + heads[:, None] * qh + columns[None, :] * qd, mask=inside, other=0.0)
    largest = tl.full((GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP,), tl.float32)
    result = tl.zeros((GROUP, BLOCK_D), tl.float32)
    if HAS_SLOPES:
        slopes = tl.load(SLOPES + heads, mask=rows < group, other=0.0)
    for at in range(start, end, BLOCK):
        positions = at + tl.arange(0, BLOCK)
        seen = (positions >= first) & (positions < end)
        wanted = seen[:, None] & (columns < d)[None, :]
        far = positions.to(tl.int64)
        keys = tl.load(
            K + b * kb + head * kh + far[:, None] * km + columns[None, :] * kd, mask=wanted, other=0.0
        )
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        if HAS_SLOPES:
            scores -= slopes[:, None] * (length - 1 - positions).to(tl.float32)[None, :]
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new = tl.maximum(largest, tl.max(scores, axis=1))
        # A block without any wanted position leaves everything as it is.
        known = new > float("-inf")
        weights = tl.where(known[:, None], tl.exp(scores - new[:, None]), 0.0)
        keep = tl.where(known, tl.exp(largest - new), 1.0)
        values = tl.load(
            V + b * vb + head * vh + far[:, None] * vm + columns[None, :] * vd, mask=wanted, other=0.0
        )
        result = result * keep[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        total = total * keep + tl.sum(weights, axis=1)
        largest = new
    result = tl.where(total[:, None] > 0, result / total[:, None], 0.0)
    out = OUT + b * ob + heads[:, None] * oh + part * op + columns[None, :] * od
    tl.store(out, result.to(OUT.dtype.element_ty), mask=inside)
    if PARTS > 1:
        logs = tl.where(total > 0, largest + tl.log(total), float("-inf"))
        tl.store(LOGS + (b * kv_heads * group + heads) * PARTS + part, logs, mask=rows < group)


@triton.jit
def combine_kernel(
    PARTIAL, LOGS, OUT, d, PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Weight the results of a head's parts by the sums of their exponentials."""
    row = tl.program_id(0).to(tl.int64)
    parts, columns = tl.arange(0, BLOCK_PARTS), tl.arange(0, BLOCK_D)
    logs = tl.load(LOGS + row * PARTS + parts, mask=parts < PARTS, other=float("-inf"))
    largest = tl.max(logs, axis=0)
    weights = tl.where(largest > float("-inf"), tl.exp(logs - largest), 0.0)
    inside = (parts < PARTS)[:, None] & (columns < d)[None, :]
    results = tl.load(PARTIAL + (row * PARTS + parts)[:, None] * d + columns[None, :], mask=inside, other=0.0)
    total = tl.maximum(tl.sum(weights, axis=0), 1e-30)
    out = tl.sum(results * weights[:, None], axis=0) / total
    tl.store(OUT + row * d + columns, out.to(OUT.dtype.element_ty), mask=columns < d)
