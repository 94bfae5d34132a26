# Gluon's compiler supports neither starred lists nor Python's types in these functions.
# ruff: noqa: SIM102
# pyright: reportCallIssue=false, reportArgumentType=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false
"""Parts of FlashAttention's Hopper kernels in Gluon: barriers, the online softmax, steps of the forward.

Keys are processed from the last to the first, so masked tiles come first; a program without keys (causal, n >
m) processes one fully masked tile. Persistent programs process many tiles and release buffers of keys and
values through mbarriers in shared memory; others process one tile and release them through named barriers
(PTX ISA, bar.sync and bar.arrive), at which threads arrive without waiting.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LN_2 = gl.constexpr(0.6931471805599453)
NAMED = gl.constexpr(5)  # First named barrier that Triton does not use with three groups (CUDA has 16)
GROUP_ROWS = gl.constexpr(64)  # Query rows per group: the rows of one wgmma instruction
THREADS_OF_ROW = gl.constexpr(
    gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4]
    )
)
"""[rows, 4]: the four threads that hold a row of an accumulator (PTX ISA, wgmma.mma_async, matrix D)."""
GROUP_THREADS = gl.constexpr(128)
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # renamed in Triton 3.7


@gluon.jit
def _wait_for(barrier, threads: gl.constexpr, warps: gl.constexpr):
    """Wait at a named barrier, as a group or the loading warp, until ``threads`` in all have arrived."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])
    ids = gl.full([32 * warps], barrier, gl.int32, layout)
    counts = gl.full([32 * warps], threads, gl.int32, layout)
    gl.inline_asm_elementwise(
        "bar.sync $1, $2; mov.u32 $0, 0;", "=r,r,r,~{memory}", [ids, counts],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _arrive_at(barrier, threads: gl.constexpr):
    """Arrive at a named barrier without waiting."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    ids = gl.full([GROUP_THREADS], barrier, gl.int32, layout)
    counts = gl.full([GROUP_THREADS], threads, gl.int32, layout)
    gl.inline_asm_elementwise(
        "bar.arrive $1, $2; mov.u32 $0, 0;", "=r,r,r,~{memory}", [ids, counts],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _release(barrier):
    """Signal ``barrier`` once all warps of the group have finished with the buffer that it guards."""
    _barrier()
    mbarrier.arrive(barrier, count=1)


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


@gluon.jit
def _position(
    number, n, heads, all_heads, GROUPS: gl.constexpr, HEADS_AT_ONCE: gl.constexpr, PERSISTENT: gl.constexpr
):
    """Return first row, batch and head of a tile: HEADS_AT_ONCE heads at a time, their longest rows first.

    In persistent programs every other set of heads, counted from the last, starts with its shortest rows, so
    neighbouring tiles have similar lengths. ``lengths`` in schedule.py follows the same order.
    """
    BLOCK_M: gl.constexpr = GROUPS * GROUP_ROWS
    blocks = gl.cdiv(n, BLOCK_M)
    group = number // (HEADS_AT_ONCE * blocks)
    first_head = group * HEADS_AT_ONCE
    num_heads = gl.minimum(HEADS_AT_ONCE, all_heads - first_head)
    index = number - first_head * blocks
    if PERSISTENT:
        if (gl.cdiv(all_heads, HEADS_AT_ONCE) - group) % 2 == 0:
            index = num_heads * blocks - 1 - index
    batch_head = first_head + index % num_heads
    return (blocks - 1 - index // num_heads) * BLOCK_M, batch_head // heads, batch_head % heads


@gluon.jit
def _tile_numbers(first, n, m, GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """Return the key tiles that these rows need, and how many of them need no mask."""
    stop, whole = m, m
    if CAUSAL:
        stop = gl.minimum(m, gl.maximum(0, first + GROUPS * GROUP_ROWS + (m - n)))
        whole = gl.minimum(m, gl.maximum(0, first + (m - n) + 1))
    tiles = gl.maximum(1, gl.cdiv(stop, BLOCK_N))
    return tiles, gl.minimum(tiles - 1, whole // BLOCK_N)


@gluon.jit
def _load(X, tiles, full, buffer, batch, head, row):
    """Start loading a tile of queries, keys or values; ``full`` signals its arrival."""
    mbarrier.expect(full.index(buffer), X.block_type.nbytes)
    tma.async_copy_global_to_shared(X, [batch, head, row, 0], full.index(buffer), tiles.index(buffer))


@gluon.jit
def _free(empty, barrier, stage, GROUPS: gl.constexpr, PERSISTENT: gl.constexpr):
    """Release a buffer of keys or values through ``empty`` or the named barriers from ``barrier`` on."""
    if PERSISTENT:
        _release(empty.index(stage))
    else:
        _arrive_at(barrier + stage, GROUPS * GROUP_THREADS + 32)


@gluon.jit
def _scores(
    q_tiles, k_tiles, buffer, stage, s_layout: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr
):
    """Start Q K^T of a group's queries and a tile of keys."""
    q = q_tiles.index(buffer).reshape([GROUP_ROWS, BLOCK_D])
    k = k_tiles.index(stage).reshape([BLOCK_N, BLOCK_D]).permute((1, 0))
    zeros = gl.zeros([GROUP_ROWS, BLOCK_N], gl.float32, s_layout)
    return warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)


@gluon.jit
def _added(
    acc, p, shrink, v_tiles, stage, p_layout: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr
):
    """Start adding probabilities times values; the product reads the returned probabilities until it ends."""
    acc = _shrunk(acc, shrink)  # while the product for the scores runs
    probabilities = _operand(p, v_tiles.dtype, p_layout)
    values = v_tiles.index(stage).reshape([BLOCK_N, BLOCK_D])
    return warpgroup_mma(probabilities, values, acc, is_async=True), probabilities


@gluon.jit
def _first_step(
    scores, rows, tiles, n, m, scale_log2, s_layout: gl.constexpr,
    BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Return the probabilities of a tile's last keys, which come first."""
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    row_max = gl.full([GROUP_ROWS], float("-inf"), gl.float32, row_layout)
    row_sum = gl.zeros([GROUP_ROWS, 4], gl.float32, THREADS_OF_ROW)  # one per thread of a row
    p, row_max, row_sum, shrink = _probabilities(
        scores, row_max, row_sum, rows, (tiles - 1) * BLOCK_N, n, m, scale_log2,
        gl.SliceLayout(0, s_layout), BLOCK_N, True, CAUSAL,
    )  # fmt: skip
    return _packed(p, DTYPE), row_max, row_sum, shrink


@gluon.jit
def _steps(
    acc, p, shrink, row_max, row_sum, q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
    start, stop, tiles, done, buffer, rows, n, m, scale_log2, s_layout: gl.constexpr, p_layout: gl.constexpr,
    GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, PERSISTENT: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Run steps ``start`` to ``stop``: this step's scores overlap the last step's product with the values.

    ``done`` tiles of keys were loaded for earlier tiles of queries; this one's queries are in buffer
    ``buffer``.
    """
    for step in range(start, stop):
        stage, phase = (done + step) % STAGES, ((done + step) // STAGES) & 1
        old_stage = (done + step - 1) % STAGES
        mbarrier.wait(k_full.index(stage), phase)
        scores = _scores(q_tiles, k_tiles, buffer, stage, s_layout, BLOCK_N, BLOCK_D)
        acc, probabilities = _added(acc, p, shrink, v_tiles, old_stage, p_layout, BLOCK_N, BLOCK_D)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        _free(k_empty, NAMED, stage, GROUPS, PERSISTENT)
        new_p, row_max, row_sum, shrink = _probabilities(
            scores, row_max, row_sum, rows, (tiles - 1 - step) * BLOCK_N, n, m, scale_log2,
            gl.SliceLayout(0, s_layout), BLOCK_N, MASKED, CAUSAL,
        )  # fmt: skip
        # This step's values. The loop in this wait keeps ptxas from waiting for the product above before the
        # softmax.
        mbarrier.wait(v_full.index(stage), phase)
        acc, probabilities = warpgroup_mma_wait(0, deps=(acc, probabilities))
        _free(v_empty, NAMED + STAGES, old_stage, GROUPS, PERSISTENT)
        p = _packed(new_p, v_tiles.dtype)
    return acc, p, shrink, row_max, row_sum


@gluon.jit
def _all_steps(
    p, shrink, row_max, row_sum, q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
    whole, tiles, done, buffer, rows, n, m, scale_log2, s_layout: gl.constexpr, o_layout: gl.constexpr,
    p_layout: gl.constexpr, GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, PERSISTENT: gl.constexpr,
):  # fmt: skip
    """Run all steps but the first, masked ones first; the last step's values remain to be added."""
    acc = gl.zeros([GROUP_ROWS, BLOCK_D], gl.float32, o_layout)
    mbarrier.wait(v_full.index(done % STAGES), (done // STAGES) & 1)
    acc, p, shrink, row_max, row_sum = _steps(
        acc, p, shrink, row_max, row_sum, q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
        1, tiles - whole, tiles, done, buffer, rows, n, m, scale_log2, s_layout, p_layout,
        GROUPS, BLOCK_N, BLOCK_D, STAGES, CAUSAL, PERSISTENT, True,
    )  # fmt: skip
    return _steps(
        acc, p, shrink, row_max, row_sum, q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
        tiles - whole, tiles, tiles, done, buffer, rows, n, m, scale_log2, s_layout, p_layout,
        GROUPS, BLOCK_N, BLOCK_D, STAGES, CAUSAL, PERSISTENT, False,
    )  # fmt: skip


@gluon.jit
def _finish(
    OUT, LSE, o_tiles, acc, row_max, row_sum, first, batch, head, heads, n, member: gl.constexpr,
    s_layout: gl.constexpr, PERSISTENT: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    """Store the log-sum-exp of a group's 64 rows and start storing their output."""
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    row_sum = gl.convert_layout(gl.sum(row_sum, 1), row_layout)
    none = row_sum == 0.0
    total = gl.where(none, 1.0, row_sum)
    lse = gl.where(none, float("-inf"), (row_max + gl.log2(total)) * LN_2)
    rows = first + member * GROUP_ROWS + gl.arange(0, GROUP_ROWS, row_layout)
    at = (batch * heads + head).to(gl.int64) * n + rows
    gl.store(LSE + at, lse, mask=rows < n)
    out = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, acc.type.layout))[:, None]
    if PERSISTENT:  # the previous tile may still be stored from this buffer
        tma.store_wait(0)
        _barrier()
    o_tiles.index(member).reshape([GROUP_ROWS, BLOCK_D]).store(out.to(o_tiles.dtype))
    fence_async_shared()
    _barrier()
    tma.async_copy_shared_to_global(OUT, [batch, head, first + member * GROUP_ROWS, 0], o_tiles.index(member))
