"""SwiGLU rounded to fp8 in Triton, in fp32. A program computes a tile of ROWS tokens and BLOCK columns."""

# Constants of a kernel are of types that only Triton knows.
# pyright: reportAssignmentType=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from trainfit.kernels.fp8_cast.triton import larger, loaded, raise_to, store_both


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
    """Return the gradients of gate and up."""
    s = _sigmoid(g, FAST)
    h = g * s
    return d * u * (s + h - h * s), d * h


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
def _hidden_of(GATE_UP, rows, columns, f, inside, FAST: tl.constexpr):
    """Return silu(gate) * up of a tile."""
    g = loaded(GATE_UP, rows, columns, 2 * f, inside, FAST)
    return g * _sigmoid(g, FAST) * loaded(GATE_UP + f, rows, columns, 2 * f, inside, FAST)


@triton.jit
def swiglu_fp8_kernel(
    GATE_UP, AMAX, OUT, TRANSPOSED, SCALE, quarter, f,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LEAST: tl.constexpr, LARGEST: tl.constexpr, WORDS: tl.constexpr,
    DELAYED: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Write silu(gate) * up in both layouts; DELAYED: raise AMAX + 1 to its largest magnitude."""
    fours = tl.program_id(0).to(tl.int64) * (ROWS // 4) + tl.arange(0, ROWS // 4)
    first = 4 * fours
    columns = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (fours[:, None] < quarter) & (columns[None, :] < f)
    tiles = (
        _hidden_of(GATE_UP, first, columns, f, inside, FAST),
        _hidden_of(GATE_UP, first + 1, columns, f, inside, FAST),
        _hidden_of(GATE_UP, first + 2, columns, f, inside, FAST),
        _hidden_of(GATE_UP, first + 3, columns, f, inside, FAST),
    )
    scale = tl.maximum(_amax(AMAX, DELAYED), LEAST) / LARGEST
    store_both(tiles, OUT, TRANSPOSED, fours, columns, quarter, f, inside, 1.0 / scale, LARGEST, WORDS)
    if DELAYED:
        raise_to(AMAX + 1, larger(larger(tiles[0], tiles[1]), larger(tiles[2], tiles[3])))
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
            dg, du = _gradients(d, g, u, FAST)  # pyright: ignore[reportGeneralTypeIssues]
            largest = larger(largest, larger(dg, du))
        raise_to(AMAX + DELAYED, largest)


@triton.jit
def _gradients_of(D, GATE_UP, rows, columns, f, inside, FAST: tl.constexpr):
    """Return the gradients of gate and up of a tile."""
    d = loaded(D, rows, columns, f, inside, FAST)
    g = loaded(GATE_UP, rows, columns, 2 * f, inside, FAST)
    return _gradients(d, g, loaded(GATE_UP + f, rows, columns, 2 * f, inside, FAST), FAST)


@triton.jit
def swiglu_backward_fp8_kernel(
    D, GATE_UP, AMAX, OUT, TRANSPOSED, SCALE, quarter, f,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LEAST: tl.constexpr, LARGEST: tl.constexpr, WORDS: tl.constexpr,
    DELAYED: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Write the gradients of gate and up in both layouts, as halves of one tensor; DELAYED as forward."""
    fours = tl.program_id(0).to(tl.int64) * (ROWS // 4) + tl.arange(0, ROWS // 4)
    first = 4 * fours
    columns = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (fours[:, None] < quarter) & (columns[None, :] < f)
    a, e = _gradients_of(D, GATE_UP, first, columns, f, inside, FAST)
    b, h = _gradients_of(D, GATE_UP, first + 1, columns, f, inside, FAST)
    c, i = _gradients_of(D, GATE_UP, first + 2, columns, f, inside, FAST)
    d, j = _gradients_of(D, GATE_UP, first + 3, columns, f, inside, FAST)
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
