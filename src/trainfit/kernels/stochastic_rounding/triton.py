"""Stochastic rounding of fp32 to bf16 in Triton, and a weighted sum of two tensors.

The random bits of an element follow from a seed and its index, so a run is reproducible bit for bit.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rounded(x, noise):
    """Round fp32 values stochastically to values that bf16 represents; inf and NaN are unchanged.

    The lower 16 bits of ``noise`` are added to the 16 bits that bf16 lacks, which are then cleared.
    """
    bits = x.to(tl.int32, bitcast=True)
    cut = ((bits + (noise & 0xFFFF).to(tl.int32)) & -65536).to(tl.float32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    return tl.where(finite, cut, x)


@triton.jit
def rounded_at_random(x, seed, at):
    """Round with the random bits of ``seed`` at each index (the lower 32 bits of ``at``)."""
    return rounded(x, tl.randint(seed, at.to(tl.int32)))


@triton.jit(do_not_specialize=["seed"])
def weighted_sum_kernel(P, U, keep, factor, seed, numel, BLOCK: tl.constexpr):
    """Compute P = keep * P + factor * U, rounded stochastically to bf16."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    p = tl.load(P + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(U + at, mask=inside, other=0.0).to(tl.float32)
    p = rounded_at_random(p * keep + u * factor, seed, at)
    tl.store(P + at, p.to(P.dtype.element_ty), mask=inside)
