# Gluon's compiler supports neither starred lists nor Python's types in these functions.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false
"""Online softmax of FlashAttention's Hopper forward in Gluon, in registers."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

GROUP_ROWS = gl.constexpr(64)
"""Query rows per group: the rows of one wgmma instruction."""
THREADS_OF_ROW = gl.constexpr(
    gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4]
    )
)
"""[rows, 4]: the four threads that hold a row of an accumulator (PTX ISA, wgmma.mma_async, matrix D)."""


@gluon.constexpr_function
def _unless_one(size):
    """Return PTX that multiplies ``size`` registers by their factors unless all factors of the warp are 1.

    Registers are in accumulator order (PTX ISA, wgmma.mma_async, matrix D): two of one row, then two of
    another.
    """
    lines = [
        "{ .reg .pred differs, any;",
        f"setp.neu.f32 differs, ${2 * size}, 0f3F800000;",
        f"setp.neu.or.f32 differs, ${2 * size + 2}, 0f3F800000, differs;",
        "vote.sync.any.pred any, differs, 0xffffffff;",
        *(f"mov.b32 ${i}, ${size + i};" for i in range(size)),
        "@!any bra DONE;",
        *(f"mul.f32 ${i}, ${i}, ${2 * size + i % 4 // 2 * 2};" for i in range(size)),
        "DONE: }",
    ]
    return "\n".join(lines)


@gluon.constexpr_function
def _registers(size):
    return ",".join(["=&f"] * size + ["f"] * 2 * size)


@gluon.jit
def _shrunk(acc, shrink):
    """Rescale the accumulator to the new maxima; most factors are 1."""
    factors = gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
    size: gl.constexpr = acc.shape[1] // 2
    asm: gl.constexpr = _unless_one(size)
    registers: gl.constexpr = _registers(size)
    return gl.inline_asm_elementwise(
        asm, registers, [acc, factors], dtype=gl.float32, is_pure=True, pack=size
    )


@gluon.jit
def _probabilities(
    scores, row_max, row_sum, rows, key, n, m, scale_log2, keys_layout: gl.constexpr,
    BLOCK_N: gl.constexpr, MASKED: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Return exp2 of the scores, the rows' new maxima and sums, and the factors of earlier results."""
    if MASKED:
        keys = key + gl.arange(0, BLOCK_N, keys_layout)
        last = gl.full([GROUP_ROWS], m - 1, gl.int32, row_max.type.layout)
        if CAUSAL:
            last = gl.minimum(rows + (m - n), last)
        # In PTX, because the compiler packs comparisons into registers bit by bit.
        scores = gl.inline_asm_elementwise(
            "{ .reg .pred seen; setp.le.s32 seen, $2, $3; selp.f32 $0, $1, 0fFF800000, seen; }", "=f,f,r,r",
            [scores, keys[None, :], last[:, None]], dtype=gl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    # Four independent chains of comparisons.
    largest = gl.max(gl.max(scores.reshape([GROUP_ROWS, 4, BLOCK_N // 4]), 1), 1)
    largest = gl.convert_layout(largest, row_max.type.layout, assert_trivial=True)
    new_max = gl.maximum(row_max, largest * scale_log2)
    # Keep the old maximum while no exponential exceeds 2^8.
    new_max = gl.where(new_max > row_max + 8.0, new_max, row_max)
    offset = new_max
    if MASKED:  # a row without a key so far: exp2(-inf - 0) is 0, exp2(-inf - -inf) is NaN
        offset = gl.where(new_max == float("-inf"), 0.0, new_max)
    p = gl.exp2(scores * scale_log2 - offset[:, None])
    shrink = gl.exp2(row_max - offset)
    parts = gl.sum(gl.sum(p.reshape([GROUP_ROWS, BLOCK_N // 8, 4, 2]), 3), 1)
    layout: gl.constexpr = gl.SliceLayout(1, row_sum.type.layout)
    shrinks = gl.convert_layout(shrink, layout, assert_trivial=True)[:, None]
    row_sum = row_sum * shrinks + gl.convert_layout(parts, row_sum.type.layout, assert_trivial=True)
    return p, new_max, row_sum, shrink


@gluon.jit
def _packed(p, dtype: gl.constexpr):
    """Pack fp32 [rows, keys] to 16 bits, two per int32; loops carry single 16-bit values slowly."""
    low, high = p.reshape([GROUP_ROWS, p.shape[1] // 2, 2]).split()
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
        )


@gluon.jit
def _operand(p, dtype: gl.constexpr, p_layout: gl.constexpr):
    """Return ``_packed`` probabilities as the operand of a product."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [p], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    halves = gl.join(low.to(dtype, bitcast=True), high.to(dtype, bitcast=True))
    return gl.convert_layout(halves.reshape([GROUP_ROWS, 2 * p.shape[1]]), p_layout, assert_trivial=True)
