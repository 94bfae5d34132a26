"""SwiGLU rounded to fp8 in Triton, in fp32. A program computes a tile of ROWS tokens and BLOCK columns."""

# Constants of a kernel are of types that only Triton knows.
# pyright: reportAssignmentType=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from trainfit.kernels.fp8_cast.triton import larger, loaded, raise_to, rounded_tile, store_both


@triton.jit
def _sigmoid(x, FAST: tl.constexpr):
    """Return 1 / (1 + exp(-x)); FAST: in four instructions, within two units in the last place of fp32.

    Without, Triton guards both functions' ranges. Here what is below 2^-126 becomes 0.
    """
    if FAST:
        asm: tl.constexpr = """{
            .reg .f32 power;
            mul.ftz.f32 power, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 power, power;
            add.ftz.f32 power, power, 0f3F800000;
            rcp.approx.ftz.f32 $0, power;
        }"""  # The first constant is -log2(e).
        return tl.inline_asm_elementwise(asm, "=r,r", [x], tl.float32, is_pure=True, pack=1)
    return tl.sigmoid(x)


@triton.jit
def _gradients(d, g, u, FAST: tl.constexpr):
    """Return the gradients of gate and up, and silu(gate) * up to the bit as the forward computes it."""
    s = _sigmoid(g, FAST)
    h = g * s
    return d * u * (s + h - h * s), d * h, h * u


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
    FAST: tl.constexpr,
):  # fmt: skip
    """Raise AMAX to the largest magnitude of silu(gate) * up; DELAYED: AMAX + 1, if AMAX is 0."""
    if _is_wanted(AMAX, DELAYED):
        columns = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        largest = tl.zeros([ROWS, BLOCK], tl.float32)
        for loop in range(LOOPS):
            rows = (tl.program_id(0).to(tl.int64) * LOOPS + loop) * ROWS + tl.arange(0, ROWS)
            inside = (rows[:, None] < n) & (columns[None, :] < f)
            g = loaded(GATE_UP, rows, columns, 2 * f, inside, FAST)
            u = loaded(GATE_UP + f, rows, columns, 2 * f, inside, FAST)
            largest = larger(largest, g * _sigmoid(g, FAST) * u)
        raise_to(AMAX + DELAYED, largest)


@triton.jit
def swiglu_fp8_kernel(
    GATE_UP, AMAX, OUT, SCALE, n, f,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LEAST: tl.constexpr, LARGEST: tl.constexpr, WORDS: tl.constexpr,
    DELAYED: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Write silu(gate) * up; DELAYED: raise AMAX + 1 to its largest magnitude."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (rows[:, None] < n) & (columns[None, :] < f)
    g = loaded(GATE_UP, rows, columns, 2 * f, inside, FAST)
    x = g * _sigmoid(g, FAST) * loaded(GATE_UP + f, rows, columns, 2 * f, inside, FAST)
    scale = tl.maximum(_amax(AMAX, DELAYED), LEAST) / LARGEST
    codes = rounded_tile(x, 1.0 / scale, OUT.dtype.element_ty, LARGEST, WORDS)
    tl.store(OUT + rows[:, None] * f + columns[None, :], codes, mask=inside)
    if DELAYED:
        raise_to(AMAX + 1, x)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(SCALE, scale)


@triton.jit
def swiglu_backward_amax_kernel(
    D, GATE_UP, AMAX, n, f,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LOOPS: tl.constexpr, LEAST: tl.constexpr, DELAYED: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Raise AMAX to the largest magnitude of the gradients of gate and up; DELAYED as forward."""
    if _is_wanted(AMAX, DELAYED):
        columns = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        largest = tl.zeros([ROWS, BLOCK], tl.float32)
        for loop in range(LOOPS):
            rows = (tl.program_id(0).to(tl.int64) * LOOPS + loop) * ROWS + tl.arange(0, ROWS)
            inside = (rows[:, None] < n) & (columns[None, :] < f)
            d = loaded(D, rows, columns, f, inside, FAST)
            g = loaded(GATE_UP, rows, columns, 2 * f, inside, FAST)
            u = loaded(GATE_UP + f, rows, columns, 2 * f, inside, FAST)
            dg, du, _ = _gradients(d, g, u, FAST)  # pyright: ignore[reportGeneralTypeIssues]
            largest = larger(largest, larger(dg, du))
        raise_to(AMAX + DELAYED, largest)


@triton.jit
def _gradients_of(D, GATE_UP, rows, columns, f, inside, FAST: tl.constexpr):
    """Return what ``_gradients`` does of a tile."""
    d = loaded(D, rows, columns, f, inside, FAST)
    g = loaded(GATE_UP, rows, columns, 2 * f, inside, FAST)
    return _gradients(d, g, loaded(GATE_UP + f, rows, columns, 2 * f, inside, FAST), FAST)


@triton.jit
def swiglu_backward_fp8_kernel(
    D, GATE_UP, HIDDEN_SCALE, AMAX, OUT, TRANSPOSED, SCALE, HIDDEN, quarter, f,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LEAST: tl.constexpr, LARGEST: tl.constexpr,
    LARGEST_HIDDEN: tl.constexpr, WORDS: tl.constexpr, DELAYED: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Write the gradients of gate and up in both layouts, as halves of one tensor, and the forward's codes
    transposed; DELAYED as forward.
    """
    fours = tl.program_id(0).to(tl.int64) * (ROWS // 4) + tl.arange(0, ROWS // 4)
    first = 4 * fours
    columns = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (fours[:, None] < quarter) & (columns[None, :] < f)
    a, e, k = _gradients_of(D, GATE_UP, first, columns, f, inside, FAST)
    b, h, m = _gradients_of(D, GATE_UP, first + 1, columns, f, inside, FAST)
    c, i, o = _gradients_of(D, GATE_UP, first + 2, columns, f, inside, FAST)
    d, j, p = _gradients_of(D, GATE_UP, first + 3, columns, f, inside, FAST)
    store_both(
        (k, m, o, p), HIDDEN, HIDDEN, fours, columns, quarter, f, inside, 1.0 / tl.load(HIDDEN_SCALE),
        LARGEST_HIDDEN, WORDS, BY_ROWS=False,
    )  # fmt: skip
    inverse = LARGEST / tl.maximum(_amax(AMAX, DELAYED), LEAST)
    store_both((a, b, c, d), OUT, TRANSPOSED, fours, columns, quarter, 2 * f, inside, inverse, LARGEST, WORDS)
    store_both(
        (e, h, i, j), OUT, TRANSPOSED, fours, columns + f, quarter, 2 * f, inside, inverse, LARGEST, WORDS
    )
    if DELAYED:
        upper = larger(larger(a, b), larger(c, d))
        raise_to(AMAX + 1, larger(upper, larger(larger(e, h), larger(i, j))))
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(SCALE, tl.maximum(_amax(AMAX, DELAYED), LEAST) / LARGEST)
