"""RMSNorm rounded to fp8 in Triton, in fp32.

Kernels of whole rows take ROWS of them at once, in CHUNKS of BLOCK columns: WIDTH need not be a power of two.
A program takes one such tile after another, and its loads run ahead of what it computes (STAGES).
"""

# Constants of a kernel are of types that only Triton knows.
# pyright: reportAssignmentType=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from trainfit.kernels.fp8_cast.triton import larger, loaded, raise_to, store_both, wide


@triton.jit
def _weights(W, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr):
    """Load the weight in chunks [ROWS, BLOCK], so that threads hold of it what they hold of the rows."""
    columns = tl.zeros([ROWS, BLOCK], tl.int32) + tl.arange(0, BLOCK)[None, :]
    found = ()
    for chunk in tl.static_range(CHUNKS):
        at = columns + chunk * BLOCK
        found = found + (tl.load(W + at, mask=at < WIDTH, other=0.0).to(tl.float32),)
    return found


@triton.jit
def _zeros(ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr):
    """Return chunks [ROWS, BLOCK] of zeros."""
    found = ()
    for _ in tl.static_range(CHUNKS):
        found = found + (tl.zeros([ROWS, BLOCK], tl.float32),)
    return found


@triton.jit
def _rows(tile, n, ROWS: tl.constexpr):
    """Return a tile's rows; beyond the last one that one, so that loads need no mask."""
    rows = tile * ROWS + tl.arange(0, ROWS)
    return tl.minimum(rows, n - 1), rows < n


@triton.jit
def _chunks_of(X, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr):
    """Load rows in chunks [ROWS, BLOCK] of their dtype."""
    at = X + rows.to(tl.int64)[:, None] * WIDTH + tl.arange(0, BLOCK)[None, :]
    found = ()
    for chunk in tl.static_range(CHUNKS):
        if (chunk + 1) * BLOCK <= WIDTH:
            found = found + (tl.load(at + chunk * BLOCK),)
        else:
            inside = (tl.arange(0, BLOCK) < WIDTH - chunk * BLOCK)[None, :]
            found = found + (tl.load(at + chunk * BLOCK, mask=inside, other=0.0),)
    return found


@triton.jit
def _store(X, chunks, rows, inside, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr):
    """Store chunks of rows, of which some are inside."""
    at = X + rows.to(tl.int64)[:, None] * WIDTH + tl.arange(0, BLOCK)[None, :]
    for chunk in tl.static_range(CHUNKS):
        mask = inside[:, None]
        if (chunk + 1) * BLOCK > WIDTH:
            mask = mask & (tl.arange(0, BLOCK) < WIDTH - chunk * BLOCK)[None, :]
        tl.store(at + chunk * BLOCK, chunks[chunk], mask=mask)


@triton.jit
def _sum(x, y, PACKED: tl.constexpr):
    """Return x + y rounded to their dtype; PACKED: two elements of bf16 in an instruction."""
    if PACKED:
        asm: tl.constexpr = """{
            .reg .b32 one;
            mov.b32 one, 0x3F803F80;
            fma.rn.bf16x2 $0, $1, one, $2;
        }"""
        return tl.inline_asm_elementwise(asm, "=r,r,r", [x, y], tl.bfloat16, is_pure=True, pack=2)
    return (x.to(tl.float32) + y.to(tl.float32)).to(x.dtype)


@triton.jit
def _rms_norm_amax(
    X, A, W, H, RSTD, AMAX, n, eps,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, STAGES: tl.constexpr,
    ADDS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    w = _weights(W, WIDTH, ROWS, BLOCK, CHUNKS)
    largest = tl.zeros([ROWS, BLOCK], tl.float32)
    programs = tl.num_programs(0)
    tiles = tl.cdiv(n, ROWS)
    for iteration in tl.range(0, tl.cdiv(tiles - tl.program_id(0), programs), num_stages=STAGES):
        rows, inside = _rows(tl.program_id(0) + iteration * programs, n, ROWS)
        x = _chunks_of(X, rows, WIDTH, BLOCK, CHUNKS)
        if ADDS:
            a = _chunks_of(A, rows, WIDTH, BLOCK, CHUNKS)
            h = ()
            for chunk in tl.static_range(CHUNKS):
                h = h + (_sum(x[chunk], a[chunk], PACKED),)
            _store(H, h, rows, inside, WIDTH, BLOCK, CHUNKS)
            x = h
        squares = tl.zeros([ROWS, BLOCK], tl.float32)
        for chunk in tl.static_range(CHUNKS):
            one = wide(x[chunk], PACKED)
            squares += one * one
        rstd = tl.rsqrt(tl.sum(squares, 1) * (1.0 / WIDTH) + eps)
        tl.store(RSTD + rows, rstd, mask=inside)
        for chunk in tl.static_range(CHUNKS):
            largest = larger(largest, wide(x[chunk], PACKED) * rstd[:, None] * w[chunk])
    # Rounding keeps the order of magnitudes.
    raise_to(AMAX, largest.to(X.dtype.element_ty).to(tl.float32))


@triton.jit
def rms_norm_amax_kernel(
    X, W, RSTD, AMAX, n, eps,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, STAGES: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Write the rows' factors, and raise AMAX to the largest magnitude of y, rounded to X's dtype."""
    _rms_norm_amax(
        X, X, W, X, RSTD, AMAX, n, eps, WIDTH, ROWS, BLOCK, CHUNKS, STAGES, ADDS=False, PACKED=PACKED
    )


@triton.jit
def add_rms_norm_amax_kernel(
    X, A, W, H, RSTD, AMAX, n, eps,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, STAGES: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Write H = X + A, and of H what ``rms_norm_amax_kernel`` writes of X."""
    _rms_norm_amax(
        X, A, W, H, RSTD, AMAX, n, eps, WIDTH, ROWS, BLOCK, CHUNKS, STAGES, ADDS=True, PACKED=PACKED
    )


@triton.jit
def _rounded_to_16_bits(x, dtype: tl.constexpr, PACKED: tl.constexpr):
    """Return x rounded to a dtype, in fp32."""
    if PACKED:
        asm: tl.constexpr = """{
            .reg .b32 both;
            cvt.rn.bf16x2.f32 both, $3, $2;
            shl.b32 $0, both, 16;
            and.b32 $1, both, 0xFFFF0000;
        }"""
        return tl.inline_asm_elementwise(asm, "=r,=r,r,r", [x], tl.float32, is_pure=True, pack=2)
    return x.to(dtype).to(tl.float32)


@triton.jit
def _normed(X, RSTD, w, rows, columns, width, inside, known, PACKED: tl.constexpr):
    """Return y of a tile, rounded to X's dtype."""
    x = loaded(X, rows, columns, width, inside, PACKED)
    rstd = tl.load(RSTD + rows, mask=known, other=0.0)
    return _rounded_to_16_bits(x * rstd[:, None] * w[None, :], X.dtype.element_ty, PACKED)


@triton.jit
def _rms_norm_fp8(
    X, W, RSTD, AMAX, OUT, SCALE, quarter, width,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LEAST: tl.constexpr, LARGEST: tl.constexpr, WORDS: tl.constexpr,
    PACKED: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Write y's codes by rows or, with TURNED, transposed."""
    fours = tl.program_id(0).to(tl.int64) * (ROWS // 4) + tl.arange(0, ROWS // 4)
    first = 4 * fours
    columns = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    known = fours < quarter
    inside = known[:, None] & (columns[None, :] < width)
    w = tl.load(W + columns, mask=columns < width, other=0.0).to(tl.float32)
    tiles = (
        _normed(X, RSTD, w, first, columns, width, inside, known, PACKED),
        _normed(X, RSTD, w, first + 1, columns, width, inside, known, PACKED),
        _normed(X, RSTD, w, first + 2, columns, width, inside, known, PACKED),
        _normed(X, RSTD, w, first + 3, columns, width, inside, known, PACKED),
    )
    scale = tl.maximum(tl.load(AMAX), LEAST, tl.PropagateNan.ALL) / LARGEST
    store_both(
        tiles, OUT, OUT, fours, columns, quarter, width, inside, 1.0 / scale, LARGEST, WORDS,
        not TURNED, TURNED,
    )  # fmt: skip
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(SCALE, scale)


@triton.jit
def rms_norm_fp8_rows_kernel(
    X, W, RSTD, AMAX, OUT, SCALE, quarter, width,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LEAST: tl.constexpr, LARGEST: tl.constexpr, WORDS: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Write y's codes. A program rounds a tile of ROWS by BLOCK elements."""
    _rms_norm_fp8(
        X, W, RSTD, AMAX, OUT, SCALE, quarter, width, ROWS, BLOCK, LEAST, LARGEST, WORDS, PACKED, TURNED=False
    )


@triton.jit
def rms_norm_fp8_transposed_kernel(
    X, W, RSTD, AMAX, OUT, SCALE, quarter, width,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LEAST: tl.constexpr, LARGEST: tl.constexpr, WORDS: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Write y's codes transposed. A program rounds a tile of ROWS by BLOCK elements."""
    _rms_norm_fp8(
        X, W, RSTD, AMAX, OUT, SCALE, quarter, width, ROWS, BLOCK, LEAST, LARGEST, WORDS, PACKED, TURNED=True
    )


@triton.jit
def rms_norm_backward_add_kernel(
    G, X, W, RSTD, ADDED, DX, PARTS, n,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, STAGES: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Compute dx = rstd (g w - y mean(g w y)) + added with y = x rstd.

    PARTS[i] is the sum of g y over program i's rows.
    """
    w = _weights(W, WIDTH, ROWS, BLOCK, CHUNKS)
    dw = _zeros(ROWS, BLOCK, CHUNKS)
    programs = tl.num_programs(0)
    tiles = tl.cdiv(n, ROWS)
    for iteration in tl.range(0, tl.cdiv(tiles - tl.program_id(0), programs), num_stages=STAGES):
        rows, inside = _rows(tl.program_id(0) + iteration * programs, n, ROWS)
        g = _chunks_of(G, rows, WIDTH, BLOCK, CHUNKS)
        x = _chunks_of(X, rows, WIDTH, BLOCK, CHUNKS)
        added = _chunks_of(ADDED, rows, WIDTH, BLOCK, CHUNKS)
        rstd = tl.load(RSTD + rows)[:, None]
        # Rows beyond the last add nothing to the weight's gradient.
        of_weight = tl.where(inside[:, None], rstd, 0.0)
        products = tl.zeros([ROWS, BLOCK], tl.float32)
        sums = ()
        for chunk in tl.static_range(CHUNKS):
            product = wide(g[chunk], PACKED) * wide(x[chunk], PACKED)
            sums = sums + (dw[chunk] + product * of_weight,)
            products += product * w[chunk]
        dw = sums
        # In this order no factor is far from what it scales.
        factor = (tl.sum(products, 1) * (-1.0 / WIDTH))[:, None] * rstd * rstd * rstd
        dx = ()
        for chunk in tl.static_range(CHUNKS):
            of_x = wide(x[chunk], PACKED) * factor + wide(added[chunk], PACKED)
            found = wide(g[chunk], PACKED) * w[chunk] * rstd + of_x
            dx = dx + (found.to(DX.dtype.element_ty),)
        _store(DX, dx, rows, inside, WIDTH, BLOCK, CHUNKS)
    columns = tl.arange(0, BLOCK)
    for chunk in tl.static_range(CHUNKS):
        at = columns + chunk * BLOCK
        part = tl.sum(dw[chunk], 0)  # pyright: ignore[reportIndexIssue]
        tl.store(PARTS + tl.program_id(0).to(tl.int64) * WIDTH + at, part, mask=at < WIDTH)
