"""Cross-entropy of a matrix of logits in Triton: one program a row, which reads its row twice and writes it once.

The first pass keeps, in each lane, the highest logit it has seen and the sum of exponentials relative to it: one exponential a
logit, no exchange between threads until the row's end. What is large is subtracted from what is large: the highest logit from the others
before anything small is added, so the loss is kept whatever the logits' size. The second writes the gradient over the logits. A row of 131,072
bf16 logits is 256 KiB: one for each of an H200's 132 multiprocessors would fit its L2 (50 MB), the four that run on each do not,
so the second read may be from memory: 6 bytes a logit.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _logits(at, inside, scale, softcap, SOFTCAP: tl.constexpr):
    """The row's logits, -inf outside, and their tanh (1 - softcap's slope squared follows from it)."""
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32) * scale
    t = x
    if SOFTCAP:
        t = 2.0 * tl.sigmoid(2.0 * x / softcap) - 1.0
        x = softcap * t
    return tl.where(inside, x, float("-inf")), t


@triton.jit
def cross_entropy_kernel(
    LOGITS, TARGETS, FACTOR, LOSSES, stride, v, ignore_index, scale, softcap, smoothing, z_loss,
    SOFTCAP: tl.constexpr, SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """LOSSES [c] fp32, and with GRADIENT the rows of LOGITS [c, v] become FACTOR times their loss's gradient.

    A target that is neither ``ignore_index`` nor a column gives NaN, in the loss and the row's gradient.
    """
    row = tl.program_id(0).to(tl.int64)
    LOGITS += row * stride  # 64 bits: c * stride may pass 2^31
    columns = tl.arange(0, BLOCK)
    target = tl.load(TARGETS + row)
    if target == ignore_index:
        tl.store(LOSSES + row, 0.0)
        if GRADIENT:
            for start in range(0, v, BLOCK):
                zeros = tl.zeros((BLOCK,), LOGITS.dtype.element_ty)
                tl.store(LOGITS + start + columns, zeros, mask=start + columns < v)
    else:
        valid = (target >= 0) & (target < v)
        # Read before the reductions below, whose barriers keep it before any thread's writes.
        right, _t = _logits(LOGITS + target, valid, scale, softcap, SOFTCAP)  # pyright: ignore[reportGeneralTypeIssues]
        right = tl.where(valid, right, float("nan"))
        highest = tl.full((BLOCK,), -3.4028234663852886e38, tl.float32)  # finite: -inf less -inf would be NaN
        sums = tl.zeros((BLOCK,), tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, v, BLOCK):
            inside = start + columns < v
            x, _squashed = _logits(LOGITS + start + columns, inside, scale, softcap, SOFTCAP)
            difference = x - highest
            e = tl.exp(-tl.abs(difference))
            sums = tl.where(difference > 0, sums * e + 1.0, sums + e)
            highest = tl.maximum(highest, x)
            if SMOOTHING:
                total += tl.where(inside, x - right, 0.0)
        top = tl.max(highest, 0)
        exponentials = tl.sum(sums * tl.exp(highest - top), 0)
        lse = top + tl.log(exponentials)
        loss = (top - right) + tl.log(exponentials)
        if SMOOTHING:
            # An impossible target has an infinite loss, and is infinitely far below the mean.
            loss = tl.where(right == float("-inf"), loss, loss - smoothing * (tl.sum(total, 0) / v))
        if Z_LOSS:
            loss += z_loss * lse * lse
        tl.store(LOSSES + row, loss)
        if GRADIENT:
            factor = tl.where(valid, tl.load(FACTOR), float("nan")) * scale
            weight = 1.0 / exponentials
            if Z_LOSS:
                weight *= 1.0 + 2.0 * z_loss * lse
            everywhere = smoothing / v
            for start in range(0, v, BLOCK):
                inside = start + columns < v
                x, t = _logits(LOGITS + start + columns, inside, scale, softcap, SOFTCAP)
                g = tl.exp(x - top) * weight
                g -= tl.where(start + columns == target, 1.0 - smoothing, 0.0)
                if SMOOTHING:
                    g -= everywhere
                if SOFTCAP:
                    g *= 1.0 - t * t
                tl.store(LOGITS + start + columns, (g * factor).to(LOGITS.dtype.element_ty), mask=inside)
