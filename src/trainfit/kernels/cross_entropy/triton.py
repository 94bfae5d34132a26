"""Cross-entropy of logits in Triton: one program per row, which is read twice and written once.

The first pass is an online softmax: each thread keeps its highest logit and the sum of exponentials relative
to it, with one exponential per logit and no exchange until the row's end. The highest logit is subtracted
before anything small is added, so large logits do not lose the loss. The second pass overwrites the logits
with their gradient, from the row's end to its beginning, as the end is likelier to be in the cache. The rows
in flight exceed an H200's L2 cache at large vocabularies, so memory traffic is up to 6 bytes per bf16 logit.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _logits(at, inside, scale, softcap, SOFTCAP: tl.constexpr):
    """Return logits, -inf outside the row, and with SOFTCAP their tanh, of which 1 - tanh^2 is the slope."""
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32) * scale
    t = x
    if SOFTCAP:
        t = 2.0 * tl.sigmoid(2.0 * x / softcap) - 1.0
        x = softcap * t
    return tl.where(inside, x, float("-inf")), t


@triton.jit
def cross_entropy_kernel(
    LOGITS, TARGETS, FACTOR, LOSSES, stride, factor_stride, v, ignore_index, scale, softcap, smoothing,
    z_loss,
    SOFTCAP: tl.constexpr, SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write LOSSES [c] in fp32; with GRADIENT overwrite LOGITS [c, v] with FACTOR times their gradient.

    FACTOR is one number, of stride 0, or [c].
    A target that is neither ``ignore_index`` nor a column gives NaN in the loss and in the row's gradient.
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
        # Read before the reductions, whose barriers order this read before any thread's writes.
        right, _t = _logits(  # pyright: ignore[reportGeneralTypeIssues]
            LOGITS + target, valid, scale, softcap, SOFTCAP
        )
        right = tl.where(valid, right, float("nan"))
        highest = tl.full((BLOCK,), -3.4028234663852886e38, tl.float32)  # finite, because -inf - -inf is NaN
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
            # A target with logit -inf has an infinite loss; the smoothing term would be NaN.
            loss = tl.where(right == float("-inf"), loss, loss - smoothing * (tl.sum(total, 0) / v))
        if Z_LOSS:
            loss += z_loss * lse * lse
        tl.store(LOSSES + row, loss)
        if GRADIENT:
            factor = tl.where(valid, tl.load(FACTOR + row * factor_stride), float("nan")) * scale
            weight = 1.0 / exponentials
            if Z_LOSS:
                weight *= 1.0 + 2.0 * z_loss * lse
            everywhere = smoothing / v
            last = (tl.cdiv(v, BLOCK) - 1) * BLOCK
            for done in range(0, v, BLOCK):
                start = last - done  # Backwards: the row's end was read last, and may still be in the cache.
                inside = start + columns < v
                x, t = _logits(LOGITS + start + columns, inside, scale, softcap, SOFTCAP)
                g = tl.exp(x - top) * weight
                g -= tl.where(start + columns == target, 1.0 - smoothing, 0.0)
                if SMOOTHING:
                    g -= everywhere
                if SOFTCAP:
                    g *= 1.0 - t * t
                tl.store(LOGITS + start + columns, (g * factor).to(LOGITS.dtype.element_ty), mask=inside)


@triton.jit
def multiply_unless_one_kernel(X, RATIO, numel, BLOCK: tl.constexpr):
    """Compute X *= RATIO in a grid-stride loop; every program returns at once if RATIO is 1."""
    ratio = tl.load(RATIO).to(tl.float32)
    if ratio != 1.0:
        columns = tl.arange(0, BLOCK)
        start = tl.program_id(0).to(tl.int64) * BLOCK
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        while start < numel:
            at = start + columns
            x = tl.load(X + at, mask=at < numel, other=0.0).to(tl.float32)
            tl.store(X + at, (x * ratio).to(X.dtype.element_ty), mask=at < numel)
            start += step
