"""Round to fp8 in Triton, in fp32. A program rounds a tile of ROWS by BLOCK elements."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rounded_tile(X, inverse, dtype: tl.constexpr, LARGEST: tl.constexpr, WORDS: tl.constexpr):
    """Round a tile; NaN stays NaN.

    Args:
        inverse: multiplies the tile; 1 / scale.
        WORDS: keep ptxas from taking packed conversions apart; the interpreter has no instruction for it.
    """
    codes = tl.maximum(X * inverse, -LARGEST, tl.PropagateNan.ALL)
    codes = tl.minimum(codes, LARGEST, tl.PropagateNan.ALL).to(dtype)
    if WORDS:
        # ptxas 12.8 and 12.9 read one of two codes that an instruction has made together before it is made,
        # if both layouts are stored (triton-lang/triton#11111). A word of four codes that an instruction has
        # written, as far as ptxas sees, is not merged with the conversions.
        words = [codes.to(tl.uint8, bitcast=True)]
        words = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", words, tl.uint8, is_pure=False, pack=4)
        codes = words.to(dtype, bitcast=True)  # pyright: ignore[reportArgumentType]
    return codes


@triton.jit
def store_both(
    X, OUT, TRANSPOSED, rows, columns, n, width, inside, inverse, LARGEST: tl.constexpr, WORDS: tl.constexpr
):  # fmt: skip
    """Round a tile and store it in both layouts, [n, width] and [width, n]."""
    codes = rounded_tile(X, inverse, OUT.dtype.element_ty, LARGEST, WORDS)
    tl.store(OUT + rows[:, None] * width + columns[None, :], codes, mask=inside)
    tl.store(TRANSPOSED + columns[:, None] * n + rows[None, :], tl.trans(codes), mask=tl.trans(inside))


@triton.jit
def fp8_cast_kernel(
    X, AMAX, OUT, TRANSPOSED, SCALE, n, width,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LEAST: tl.constexpr, LARGEST: tl.constexpr,
    BOTH: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Write a matrix's codes, in both layouts if BOTH."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (rows[:, None] < n) & (columns[None, :] < width)
    x = tl.load(X + rows[:, None] * width + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.load(AMAX), LEAST, tl.PropagateNan.ALL) / LARGEST
    if BOTH:
        store_both(x, OUT, TRANSPOSED, rows, columns, n, width, inside, 1.0 / scale, LARGEST, WORDS)
    else:
        codes = rounded_tile(x, 1.0 / scale, OUT.dtype.element_ty, LARGEST, WORDS)
        tl.store(OUT + rows[:, None] * width + columns[None, :], codes, mask=inside)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(SCALE, scale)
