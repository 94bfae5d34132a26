"""Stochastic rounding in Triton: fp32 values become bf16's, up or down at random, so that the mean is kept.

For kernels that write weights, and one of its own: a weighted sum of two tensors. Every value is computed in fp32 from what
is read, and its random bits follow from a seed and its place, so a run repeats itself bit for bit.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rounded(x, noise):
    """fp32 values that are bf16 values: 16 random bits (``noise``, of which the lower half counts) are added below the
    last bit that stays, then cut off. What is not finite stays as it is.
    """
    bits = x.to(tl.int32, bitcast=True)
    cut = ((bits + (noise & 0xFFFF).to(tl.int32)) & -65536).to(tl.float32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    return tl.where(finite, cut, x)


@triton.jit
def rounded_at_random(x, seed, at):
    """``rounded`` by the random bits of a seed at each place (any integers; their lower 32 bits count)."""
    return rounded(x, tl.randint(seed, at.to(tl.int32)))


@triton.jit(do_not_specialize=["seed"])
def weighted_sum_kernel(P, U, keep, factor, seed, numel, BLOCK: tl.constexpr):
    """P = keep * P + factor * U, rounded to bf16 at random."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    p = tl.load(P + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(U + at, mask=inside, other=0.0).to(tl.float32)
    p = rounded_at_random(p * keep + u * factor, seed, at)
    tl.store(P + at, p.to(P.dtype.element_ty), mask=inside)
