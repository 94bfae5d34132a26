"""Round to fp8 in Triton, in fp32. A program rounds a tile of ROWS by BLOCK elements."""

# Constants of a kernel are of types that only Triton knows.
# pyright: reportAssignmentType=false, reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def larger(x, y):
    """Return the larger magnitude; NaN if one is."""
    return tl.maximum(tl.abs(x), tl.abs(y), tl.PropagateNan.ALL)


@triton.jit
def raise_to(AMAX, x):
    """Raise AMAX to a tile's largest magnitude, and to inf for NaN: the scale makes all products NaN."""
    largest = tl.reduce(tl.reduce(x, 1, larger), 0, larger)
    # Most tiles are below what others have noted, and a read costs less than an atomic operation.
    if not (largest <= tl.load(AMAX)):
        tl.atomic_max(AMAX, tl.where(largest == largest, largest, float("inf")))


@triton.jit
def wide(x, PACKED: tl.constexpr):
    """Return x in fp32; PACKED: an instruction for each element of bf16 instead of one and a half."""
    if PACKED and x.dtype == tl.bfloat16:
        asm: tl.constexpr = """{
            shl.b32 $0, $2, 16;
            and.b32 $1, $2, 0xFFFF0000;
        }"""
        return tl.inline_asm_elementwise(asm, "=&r,=&r,r", [x], tl.float32, is_pure=True, pack=2)
    return x.to(tl.float32)


@triton.jit
def rounded_tile(X, inverse, dtype: tl.constexpr, LARGEST: tl.constexpr, WORDS: tl.constexpr):
    """Round a tile; NaN stays NaN.

    Args:
        inverse: multiplies the tile; 1 / scale.
        WORDS: use a GPU's instructions, which the interpreter has not, and keep ptxas from taking packed
            conversions apart.
    """
    codes = X * inverse
    if not WORDS:  # The GPU's conversion cuts off by itself.
        codes = tl.minimum(tl.maximum(codes, -LARGEST, tl.PropagateNan.ALL), LARGEST, tl.PropagateNan.ALL)
    codes = codes.to(dtype)
    if WORDS:
        # ptxas 12.8 and 12.9 read one of two codes that an instruction has made together before it is made,
        # if both layouts are stored (triton-lang/triton#11111). A word of four codes that an instruction has
        # written, as far as ptxas sees, is not merged with the conversions.
        words = [codes.to(tl.uint8, bitcast=True)]
        words = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", words, tl.uint8, is_pure=False, pack=4)
        codes = words.to(dtype, bitcast=True)  # pyright: ignore[reportArgumentType]
    return codes


@triton.jit
def _words(a, b, c, d):
    """Return words of four codes, one of each tile.

    With rows A to D of a column each, a thread has four columns of each, 4 x 4 bytes, and eight
    instructions transpose them; the words then go through shared memory, a quarter as many as the codes.
    """
    asm: tl.constexpr = """{
        .reg .b32 ab, ab2, cd, cd2;
        prmt.b32 ab, $4, $5, 0x5140;
        prmt.b32 ab2, $4, $5, 0x7362;
        prmt.b32 cd, $6, $7, 0x5140;
        prmt.b32 cd2, $6, $7, 0x7362;
        prmt.b32 $0, ab, cd, 0x5410;
        prmt.b32 $1, ab, cd, 0x7632;
        prmt.b32 $2, ab2, cd2, 0x5410;
        prmt.b32 $3, ab2, cd2, 0x7632;
    }"""
    codes = [a.to(tl.uint8, bitcast=True), b.to(tl.uint8, bitcast=True)]
    codes += [c.to(tl.uint8, bitcast=True), d.to(tl.uint8, bitcast=True)]
    out: tl.constexpr = "=&r,=&r,=&r,=&r,r,r,r,r"
    return tl.inline_asm_elementwise(asm, out, codes, tl.uint32, is_pure=True, pack=4)


@triton.jit
def store_both(
    tiles, OUT, TRANSPOSED, fours, columns, quarter, width, inside, inverse,
    LARGEST: tl.constexpr, WORDS: tl.constexpr, BY_ROWS: tl.constexpr = True, TURNED: tl.constexpr = True,
):  # fmt: skip
    """Round four tiles and store them in both layouts, [n, width] and [width, n].

    Args:
        tiles: rows ``4 fours``, and those one, two and three below.
        quarter: n / 4.
        BY_ROWS, TURNED: store [n, width], and [width, n].
    """
    a = rounded_tile(tiles[0], inverse, OUT.dtype.element_ty, LARGEST, WORDS)
    b = rounded_tile(tiles[1], inverse, OUT.dtype.element_ty, LARGEST, WORDS)
    c = rounded_tile(tiles[2], inverse, OUT.dtype.element_ty, LARGEST, WORDS)
    d = rounded_tile(tiles[3], inverse, OUT.dtype.element_ty, LARGEST, WORDS)
    if BY_ROWS:
        rows = OUT + 4 * fours[:, None] * width + columns[None, :]
        tl.store(rows, a, mask=inside)
        tl.store(rows + width, b, mask=inside)
        tl.store(rows + 2 * width, c, mask=inside)
        tl.store(rows + 3 * width, d, mask=inside)
    if TURNED and WORDS:
        words = TRANSPOSED.to(tl.pointer_type(tl.uint32), bitcast=True)
        words += columns[:, None] * quarter + fours[None, :]
        tl.store(words, tl.trans(_words(a, b, c, d)), mask=tl.trans(inside))
    elif TURNED:
        codes = TRANSPOSED + columns[:, None] * (4 * quarter) + 4 * fours[None, :]
        tl.store(codes, tl.trans(a), mask=tl.trans(inside))
        tl.store(codes + 1, tl.trans(b), mask=tl.trans(inside))
        tl.store(codes + 2, tl.trans(c), mask=tl.trans(inside))
        tl.store(codes + 3, tl.trans(d), mask=tl.trans(inside))


@triton.jit
def loaded(X, rows, columns, width, inside, PACKED: tl.constexpr):
    """Load a tile in fp32."""
    return wide(tl.load(X + rows[:, None] * width + columns[None, :], mask=inside, other=0.0), PACKED)


@triton.jit
def fp8_cast_kernel(
    X, AMAX, OUT, SCALE, n, width,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LEAST: tl.constexpr, LARGEST: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Write a matrix's codes."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (rows[:, None] < n) & (columns[None, :] < width)
    scale = tl.maximum(tl.load(AMAX), LEAST, tl.PropagateNan.ALL) / LARGEST
    x = loaded(X, rows, columns, width, inside, WORDS)
    codes = rounded_tile(x, 1.0 / scale, OUT.dtype.element_ty, LARGEST, WORDS)
    tl.store(OUT + rows[:, None] * width + columns[None, :], codes, mask=inside)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(SCALE, scale)


@triton.jit
def fp8_cast_both_kernel(
    X, AMAX, OUT, TRANSPOSED, SCALE, quarter, width,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LEAST: tl.constexpr, LARGEST: tl.constexpr, WORDS: tl.constexpr,
    BY_ROWS: tl.constexpr = True,
):  # fmt: skip
    """Write a matrix's codes transposed, and with BY_ROWS as they are."""
    fours = tl.program_id(0).to(tl.int64) * (ROWS // 4) + tl.arange(0, ROWS // 4)
    columns = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (fours[:, None] < quarter) & (columns[None, :] < width)
    scale = tl.maximum(tl.load(AMAX), LEAST, tl.PropagateNan.ALL) / LARGEST
    tiles = (
        loaded(X, 4 * fours, columns, width, inside, WORDS),
        loaded(X, 4 * fours + 1, columns, width, inside, WORDS),
        loaded(X, 4 * fours + 2, columns, width, inside, WORDS),
        loaded(X, 4 * fours + 3, columns, width, inside, WORDS),
    )
    store_both(
        tiles, OUT, TRANSPOSED, fours, columns, quarter, width, inside, 1.0 / scale, LARGEST, WORDS, BY_ROWS
    )
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(SCALE, scale)
