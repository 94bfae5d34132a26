"""AdamW's update in Triton: one pass over a flat weight, with moments as stored, with fp32 master
weights, or in 8 or 4 bits.

Arithmetic is in fp32. The random bits of an element follow from a seed and its index.
"""

from __future__ import annotations

import triton
import triton.language as tl

from trainfit.kernels.quantize import codebook
from trainfit.kernels.stochastic_rounding.triton import rounded

LEAST_SCALE = tl.constexpr(codebook.LEAST_SCALE)


@triton.jit
def _updated(p, g, m, v, lr, decay, take1, take2, eps, correction1, correction2):
    """Return the new weight and moments (Loshchilov and Hutter, arXiv:1711.05101, algorithm 2)."""
    p -= decay * p
    m += take1 * (g - m)
    v += take2 * (g * g - v)
    p -= lr * (m / correction1) / (tl.sqrt(v) / correction2 + eps)
    return p, m, v


@triton.jit
def _rounded_for(TARGET, x, noise):
    """Round x stochastically if TARGET holds bf16; other dtypes are rounded to nearest when stored."""
    if TARGET.dtype.element_ty == tl.bfloat16:
        x = rounded(x, noise)
    return x


@triton.jit(do_not_specialize=["seed"])
def adamw_kernel(
    P, G, M, V, lr, decay, take1, take2, eps, correction1, correction2, seed, numel,
    STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update a block; STOCHASTIC rounds the bf16 ones of weight and moments stochastically."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    p = tl.load(P + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(G + at, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(M + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(V + at, mask=inside, other=0.0).to(tl.float32)
    p, m, v = _updated(  # pyright: ignore[reportGeneralTypeIssues]
        p, g, m, v, lr, decay, take1, take2, eps, correction1, correction2
    )
    if STOCHASTIC:
        noise_p, noise_m, noise_v, _ = tl.randint4x(seed, at.to(tl.int32))
        p, m, v = _rounded_for(P, p, noise_p), _rounded_for(M, m, noise_m), _rounded_for(V, v, noise_v)
    tl.store(P + at, p.to(P.dtype.element_ty), mask=inside)
    tl.store(M + at, m.to(M.dtype.element_ty), mask=inside)
    tl.store(V + at, v.to(V.dtype.element_ty), mask=inside)


@triton.jit
def adamw_master_kernel(
    P, G, MASTER, M, V, lr, decay, take1, take2, eps, correction1, correction2, unscale, numel,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Update a block of fp32 master weights and moments; P receives the weights, rounded to nearest.

    The gradient is multiplied by ``unscale``.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    g = tl.load(G + at, mask=inside, other=0.0).to(tl.float32) * unscale
    master = tl.load(MASTER + at, mask=inside, other=0.0)
    m = tl.load(M + at, mask=inside, other=0.0)
    v = tl.load(V + at, mask=inside, other=0.0)
    master, m, v = _updated(  # pyright: ignore[reportGeneralTypeIssues]
        master, g, m, v, lr, decay, take1, take2, eps, correction1, correction2
    )
    tl.store(P + at, master.to(P.dtype.element_ty), mask=inside)
    tl.store(MASTER + at, master, mask=inside)
    tl.store(M + at, m, mask=inside)
    tl.store(V + at, v, mask=inside)


@triton.jit
def _store_weight(P, at, inside, p, seed, STOCHASTIC: tl.constexpr):
    if STOCHASTIC:
        p = _rounded_for(P, p, tl.randint(seed, at.to(tl.int32)))
    tl.store(P + at, p.to(P.dtype.element_ty), mask=inside)


@triton.jit
def _code(x, BOUNDS, BITS: tl.constexpr):
    """Return the index of the nearest level by binary search in the ascending bounds; bound 0 is not read."""
    code = tl.zeros_like(x).to(tl.int32)
    for level in tl.static_range(BITS):
        at_least = x >= tl.load(BOUNDS + code + (1 << (BITS - 1 - level)))
        code += at_least.to(tl.int32) << (BITS - 1 - level)
    return code


@triton.jit
def _largest(magnitudes):
    return tl.maximum(tl.max(magnitudes, 1), LEAST_SCALE)


@triton.jit(do_not_specialize=["seed"])
def adamw8_kernel(
    P, G, MC, MS, VC, VS, LEVELS, lr, decay, take1, take2, eps, correction1, correction2, seed, numel,
    STOCHASTIC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update 8-bit moments. LEVELS: 256 values and 256 bounds of the first moment, then of the second."""
    blocks = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside, first = at < numel, blocks * BLOCK < numel
    p = tl.load(P + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(G + at, mask=inside, other=0.0).to(tl.float32)
    m_code = tl.load(MC + at, mask=inside, other=0).to(tl.int32)
    v_code = tl.load(VC + at, mask=inside, other=0).to(tl.int32)
    m = tl.load(LEVELS + m_code) * tl.load(MS + blocks, mask=first, other=0.0)[:, None]
    v = tl.load(LEVELS + 512 + v_code) * tl.load(VS + blocks, mask=first, other=0.0)[:, None]
    p, m, v = _updated(  # pyright: ignore[reportGeneralTypeIssues]
        p, g, m, v, lr, decay, take1, take2, eps, correction1, correction2
    )
    # Code 0 past the end need not stand for 0.
    m, v = tl.where(inside, m, 0.0), tl.where(inside, v, 0.0)
    m_scale, v_scale = _largest(tl.abs(m)), _largest(v)
    tl.store(MS + blocks, m_scale, mask=first)
    tl.store(VS + blocks, v_scale, mask=first)
    tl.store(MC + at, _code(m / m_scale[:, None], LEVELS + 256, 8).to(tl.uint8), mask=inside)
    tl.store(VC + at, _code(v / v_scale[:, None], LEVELS + 768, 8).to(tl.uint8), mask=inside)
    _store_weight(P, at, inside, p, seed, STOCHASTIC)


@triton.jit(do_not_specialize=["seed"])
def adamw4_kernel(
    P, G, MC, MS, VC, VS, LEVELS, lr, decay, take1, take2, eps, correction1, correction2, seed, numel,
    STOCHASTIC: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Update 4-bit moments, the first of two in the byte's upper half. LEVELS as above, 16 for 256."""
    blocks = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    pairs = blocks[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
    inside, second_inside = 2 * pairs < numel, 2 * pairs + 1 < numel
    first = blocks * (2 * PAIRS) < numel
    m_codes = tl.load(MC + pairs, mask=inside, other=0).to(tl.int32)
    v_codes = tl.load(VC + pairs, mask=inside, other=0).to(tl.int32)
    m_scale = tl.load(MS + blocks, mask=first, other=0.0)[:, None]
    v_scale = tl.load(VS + blocks, mask=first, other=0.0)[:, None]
    p = tl.load(P + 2 * pairs, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(G + 2 * pairs, mask=inside, other=0.0).to(tl.float32)
    q = tl.load(P + 2 * pairs + 1, mask=second_inside, other=0.0).to(tl.float32)
    h = tl.load(G + 2 * pairs + 1, mask=second_inside, other=0.0).to(tl.float32)
    p, m, v = _updated(  # pyright: ignore[reportGeneralTypeIssues]
        p, g, tl.load(LEVELS + (m_codes >> 4)) * m_scale, tl.load(LEVELS + 32 + (v_codes >> 4)) * v_scale,
        lr, decay, take1, take2, eps, correction1, correction2,
    )  # fmt: skip
    q, n, w = _updated(
        q, h, tl.load(LEVELS + (m_codes & 15)) * m_scale, tl.load(LEVELS + 32 + (v_codes & 15)) * v_scale,
        lr, decay, take1, take2, eps, correction1, correction2,
    )  # fmt: skip
    m, v = tl.where(inside, m, 0.0), tl.where(inside, v, 0.0)
    n, w = tl.where(second_inside, n, 0.0), tl.where(second_inside, w, 0.0)
    m_new, v_new = _largest(tl.maximum(tl.abs(m), tl.abs(n))), _largest(tl.maximum(v, w))
    tl.store(MS + blocks, m_new, mask=first)
    tl.store(VS + blocks, v_new, mask=first)
    m_code = _code(m / m_new[:, None], LEVELS + 16, 4) << 4 | _code(n / m_new[:, None], LEVELS + 16, 4)
    v_code = _code(v / v_new[:, None], LEVELS + 48, 4) << 4 | _code(w / v_new[:, None], LEVELS + 48, 4)
    tl.store(MC + pairs, m_code.to(tl.uint8), mask=inside)
    tl.store(VC + pairs, v_code.to(tl.uint8), mask=inside)
    _store_weight(P, 2 * pairs, inside, p, seed, STOCHASTIC)
    _store_weight(P, 2 * pairs + 1, second_inside, q, seed, STOCHASTIC)
