"""SwiGLU rounded to fp8 in Triton, in fp32. A program computes a tile of ROWS tokens and BLOCK columns."""

from __future__ import annotations

import triton
import triton.language as tl

from trainfit.kernels.fp8_cast.triton import store_both


@triton.jit
def _loaded(X, rows, columns, stride, inside):
    """Load a tile in fp32."""
    return tl.load(X + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _gradients(d, g, u):
    """Return the gradients of gate and up."""
    s = tl.sigmoid(g)
    return d * u * s * (1.0 + g * (1.0 - s)), d * g * s


@triton.jit
def _magnitude(x):
    """Return |x|, and inf of NaN, which ``tl.maximum`` drops: an infinite scale makes all products NaN."""
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def _raise_to(AMAX, x):
    """Raise AMAX to a tile's largest magnitude."""
    tl.atomic_max(AMAX, tl.max(tl.max(x, 1), 0))


@triton.jit
def _amax(AMAX, DELAYED: tl.constexpr):
    """Return the magnitude that the largest code stands for; DELAYED: of the step before, if it is known."""
    amax = tl.load(AMAX)
    if DELAYED:
        amax = tl.where(amax > 0.0, amax, tl.load(AMAX + 1))
    return amax


@triton.jit
def _is_wanted(AMAX, DELAYED: tl.constexpr):
    """Return whether the largest magnitude is not known from the step before."""
    return tl.load(AMAX) == 0.0 if DELAYED else True


@triton.jit
def swiglu_amax_kernel(
    GATE_UP, AMAX, n, f,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LOOPS: tl.constexpr, LEAST: tl.constexpr, DELAYED: tl.constexpr,
):  # fmt: skip
    """Raise AMAX to the largest magnitude of silu(gate) * up; DELAYED: AMAX + 1, if AMAX is 0."""
    if _is_wanted(AMAX, DELAYED):
        columns = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        largest = tl.zeros([ROWS, BLOCK], tl.float32)
        for loop in range(LOOPS):
            rows = (tl.program_id(0).to(tl.int64) * LOOPS + loop) * ROWS + tl.arange(0, ROWS)
            inside = (rows[:, None] < n) & (columns[None, :] < f)
            g = _loaded(GATE_UP, rows, columns, 2 * f, inside)
            u = _loaded(GATE_UP + f, rows, columns, 2 * f, inside)
            largest = tl.maximum(largest, _magnitude(g * tl.sigmoid(g) * u))
        _raise_to(AMAX + DELAYED, largest)


@triton.jit
def swiglu_fp8_kernel(
    GATE_UP, AMAX, OUT, TRANSPOSED, SCALE, n, f,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LEAST: tl.constexpr, LARGEST: tl.constexpr, WORDS: tl.constexpr,
    DELAYED: tl.constexpr,
):  # fmt: skip
    """Write silu(gate) * up in both layouts; DELAYED: raise AMAX + 1 to its largest magnitude."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (rows[:, None] < n) & (columns[None, :] < f)
    g = _loaded(GATE_UP, rows, columns, 2 * f, inside)
    u = _loaded(GATE_UP + f, rows, columns, 2 * f, inside)
    scale = tl.maximum(_amax(AMAX, DELAYED), LEAST) / LARGEST
    hidden = g * tl.sigmoid(g) * u
    store_both(hidden, OUT, TRANSPOSED, rows, columns, n, f, inside, 1.0 / scale, LARGEST, WORDS)
    if DELAYED:
        _raise_to(AMAX + 1, _magnitude(hidden))
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(SCALE, scale)


@triton.jit
def swiglu_backward_amax_kernel(
    D, GATE_UP, AMAX, n, f,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LOOPS: tl.constexpr, LEAST: tl.constexpr, DELAYED: tl.constexpr,
):  # fmt: skip
    """Raise AMAX to the largest magnitude of the gradients of gate and up; DELAYED as forward."""
    if _is_wanted(AMAX, DELAYED):
        columns = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        largest = tl.zeros([ROWS, BLOCK], tl.float32)
        for loop in range(LOOPS):
            rows = (tl.program_id(0).to(tl.int64) * LOOPS + loop) * ROWS + tl.arange(0, ROWS)
            inside = (rows[:, None] < n) & (columns[None, :] < f)
            d = _loaded(D, rows, columns, f, inside)
            g = _loaded(GATE_UP, rows, columns, 2 * f, inside)
            u = _loaded(GATE_UP + f, rows, columns, 2 * f, inside)
            dg, du = _gradients(d, g, u)  # pyright: ignore[reportGeneralTypeIssues]
            largest = tl.maximum(largest, tl.maximum(_magnitude(dg), _magnitude(du)))
        _raise_to(AMAX + DELAYED, largest)


@triton.jit
def swiglu_backward_fp8_kernel(
    D, GATE_UP, AMAX, OUT, TRANSPOSED, SCALE, n, f,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LEAST: tl.constexpr, LARGEST: tl.constexpr, WORDS: tl.constexpr,
    DELAYED: tl.constexpr,
):  # fmt: skip
    """Write the gradients of gate and up in both layouts, as halves of one tensor; DELAYED as forward."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (rows[:, None] < n) & (columns[None, :] < f)
    d = _loaded(D, rows, columns, f, inside)
    g = _loaded(GATE_UP, rows, columns, 2 * f, inside)
    u = _loaded(GATE_UP + f, rows, columns, 2 * f, inside)
    dg, du = _gradients(d, g, u)  # pyright: ignore[reportGeneralTypeIssues]
    scale = tl.maximum(_amax(AMAX, DELAYED), LEAST) / LARGEST
    store_both(dg, OUT, TRANSPOSED, rows, columns, n, 2 * f, inside, 1.0 / scale, LARGEST, WORDS)
    store_both(du, OUT, TRANSPOSED, rows, columns + f, n, 2 * f, inside, 1.0 / scale, LARGEST, WORDS)
    if DELAYED:
        _raise_to(AMAX + 1, tl.maximum(_magnitude(dg), _magnitude(du)))
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(SCALE, scale)
