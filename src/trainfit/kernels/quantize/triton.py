"""Quantisation to NF4, dequantisation of NF4, int8 and fp8, and transposition of codes in Triton.

Launch with ``enable_fp_fusion=False``: a fused multiply-add rounds once where the references in nf4.py and
rowwise.py round twice.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def quantize_nf4_kernel(
    WEIGHT, LEVELS, CODES, MAGNITUDES, num_weights, num_blocks, BLOCKS: tl.constexpr, PAIRS: tl.constexpr
):  # fmt: skip
    """Quantise BLOCKS blocks of 2 * PAIRS weights per program to PAIRS bytes and one fp32 magnitude each."""
    blocks = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    pairs = blocks[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
    first = tl.load(WEIGHT + 2 * pairs, mask=2 * pairs < num_weights, other=0.0).to(tl.float32)
    second = tl.load(WEIGHT + 2 * pairs + 1, mask=2 * pairs + 1 < num_weights, other=0.0).to(tl.float32)
    magnitudes = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), 1)
    divisor = tl.where(magnitudes == 0.0, 1.0, magnitudes)[:, None]
    first, second = (
        tl.div_rn(first, divisor + tl.zeros_like(first)),
        tl.div_rn(second, divisor + tl.zeros_like(second)),
    )
    upper = tl.zeros_like(pairs).to(tl.int32)
    lower = tl.zeros_like(pairs).to(tl.int32)
    for level in range(15):
        border = (tl.load(LEVELS + level) + tl.load(LEVELS + level + 1)) / 2
        upper += (first > border).to(tl.int32)
        lower += (second > border).to(tl.int32)
    valid = blocks < num_blocks
    tl.store(CODES + pairs, (upper * 16 + lower).to(tl.uint8), mask=valid[:, None])
    tl.store(MAGNITUDES + blocks, magnitudes, mask=valid)


@triton.jit
def dequantize_nf4_kernel(
    CODES, BLOCK_CODES, GROUP_SCALES, OFFSET, LEVELS, WEIGHT, num_weights, num_blocks, BLOCKS: tl.constexpr,
    PAIRS: tl.constexpr, DOUBLE: tl.constexpr
):  # fmt: skip
    """Dequantise BLOCKS blocks per program, PAIRS bytes each. DOUBLE: their magnitudes are quantised."""
    blocks = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    valid = blocks < num_blocks
    if DOUBLE:
        block_codes = tl.load(BLOCK_CODES + blocks, mask=valid, other=0).to(tl.int32)
        scales = tl.load(GROUP_SCALES + blocks // 256, mask=valid, other=0.0)
        magnitudes = (tl.load(LEVELS + 16 + block_codes) * scales + tl.load(OFFSET))[:, None]
    else:
        magnitudes = tl.load(BLOCK_CODES + blocks, mask=valid, other=0.0)[:, None]
    pairs = blocks[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
    codes = tl.load(CODES + pairs, mask=valid[:, None], other=0).to(tl.int32)
    upper = tl.load(LEVELS + (codes >> 4)) * magnitudes
    lower = tl.load(LEVELS + (codes & 15)) * magnitudes
    weights = tl.reshape(tl.join(upper, lower), (BLOCKS, 2 * PAIRS))
    offsets = blocks[:, None] * (2 * PAIRS) + tl.arange(0, 2 * PAIRS)[None, :]
    tl.store(WEIGHT + offsets, weights.to(WEIGHT.dtype.element_ty), mask=offsets < num_weights)


@triton.jit
def dequantize_rows_kernel(CODES, SCALES, WEIGHT, columns, FP8: tl.constexpr, BLOCK: tl.constexpr):
    """Dequantise BLOCK columns of one row per program. FP8: e4m3 codes as bytes, which any GPU can read."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    offsets = row * columns + column
    valid = column < columns
    codes = tl.load(CODES + offsets, mask=valid, other=0)
    if FP8:
        # Exponent and mantissa shifted to fp32's position; the factor 2^120 corrects the exponent's bias.
        bits = codes.to(tl.int32)
        value = ((bits & 127) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
        value = tl.where(bits > 127, -value, value)
    else:
        value = codes.to(tl.float32)
    weights = value * tl.load(SCALES + row)
    tl.store(WEIGHT + offsets, weights.to(WEIGHT.dtype.element_ty), mask=valid)


@triton.jit
def transpose_bytes_kernel(CODES, OUT, row_words, column_words, TILE: tl.constexpr):
    """Transpose a matrix of bytes, 4 TILE rows and columns per program.

    Memory is read and written in words of four bytes. Four words, of four rows, become four words of four
    columns: byte j of each is in word j. ``row_words``: rows / 4; ``column_words``: columns / 4.
    """
    column = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    row = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    valid = (row < row_words)[:, None] & (column < column_words)[None, :]
    places = 4 * row[:, None] * column_words + column[None, :]
    first = tl.load(CODES + places, mask=valid, other=0)
    second = tl.load(CODES + places + column_words, mask=valid, other=0)
    third = tl.load(CODES + places + 2 * column_words, mask=valid, other=0)
    fourth = tl.load(CODES + places + 3 * column_words, mask=valid, other=0)
    into = 4 * column[:, None] * row_words + row[None, :]
    for byte in tl.static_range(4):  # pyright: ignore[reportGeneralTypeIssues]
        word = (first >> 8 * byte) & 255
        word |= ((second >> 8 * byte) & 255) << 8
        word |= ((third >> 8 * byte) & 255) << 16
        word |= ((fourth >> 8 * byte) & 255) << 24
        tl.store(OUT + into + byte * row_words, tl.trans(word), mask=tl.trans(valid))
