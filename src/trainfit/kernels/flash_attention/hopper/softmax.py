# Gluon's compiler reads these functions, and it knows neither starred lists nor Python's types.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false
"""The softmax of FlashAttention's forward on Hopper in Gluon: what a group does in registers between its two products."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

GROUP_ROWS = gl.constexpr(64)
"""Query rows of a group: what one instruction multiplies."""
THREADS_OF_ROW = gl.constexpr(
    gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4]
    )
)
"""[rows, 4]: the threads that hold a row of a product's result (PTX ISA, wgmma.mma_async, matrix D)."""


@gluon.constexpr_function
def _unless_one(size):
    """PTX: ``size`` numbers of a thread times their factors, left out where all of a warp's factors are 1.

    The numbers stand as a product's result does (PTX ISA, wgmma.mma_async, matrix D): two of a row, then two of the other.
    """
    lines = [
        "{ .reg .pred here, any;",
        f"setp.neu.f32 here, ${2 * size}, 0f3F800000;",
        f"setp.neu.or.f32 here, ${2 * size + 2}, 0f3F800000, here;",
        "vote.sync.any.pred any, here, 0xffffffff;",
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
    """The results so far, of earlier maxima, beside those of the present maxima, which mostly are the same."""
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
    """exp2 of the scores, their rows' new maximum and sum, and by what earlier results shrink."""
    if MASKED:
        keys = key + gl.arange(0, BLOCK_N, keys_layout)
        last = gl.full([GROUP_ROWS], m - 1, gl.int32, row_max.type.layout)
        if CAUSAL:
            last = gl.minimum(rows + (m - n), last)
        # Written out, for the compiler gathers comparisons in registers bit by bit.
        scores = gl.inline_asm_elementwise(
            "{ .reg .pred seen; setp.le.s32 seen, $2, $3; selp.f32 $0, $1, 0fFF800000, seen; }", "=f,f,r,r",
            [scores, keys[None, :], last[:, None]], dtype=gl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    largest = gl.max(
        gl.max(scores.reshape([GROUP_ROWS, 4, BLOCK_N // 4]), 1), 1
    )  # four chains beside one another
    largest = gl.convert_layout(largest, row_max.type.layout, assert_trivial=True)
    new_max = gl.maximum(row_max, largest * scale_log2)
    # The old maximum serves as well, as long as no exponential is over 2^8.
    new_max = gl.where(new_max > row_max + 8.0, new_max, row_max)
    offset = new_max
    if MASKED:  # a row that has seen nothing yet: exp2(-inf - 0) is 0, exp2(-inf - -inf) would be no number
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
    """[rows, keys] fp32 as 16-bit numbers, two neighbours in an int32: loops carry single 16-bit numbers by shuffling bytes."""
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
    """``_packed`` probabilities as the product takes them."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [p], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    halves = gl.join(low.to(dtype, bitcast=True), high.to(dtype, bitcast=True))
    return gl.convert_layout(halves.reshape([GROUP_ROWS, 2 * p.shape[1]]), p_layout, assert_trivial=True)
