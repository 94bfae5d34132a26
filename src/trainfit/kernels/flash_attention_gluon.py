# Gluon's compiler reads these functions, and it knows neither starred lists nor Python's types.
# ruff: noqa: RUF005
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false
"""FlashAttention's forward for Hopper in Gluon: one warp loads by TMA, two or three groups of four warps compute.

Each group owns 64 query rows. While the tensor cores multiply the probabilities of the last keys by their values, the group
computes the softmax of the next; with ``TAKE_TURNS`` the groups start their products one after the other, so that one's
softmax runs under the other's products (Shah et al. 2024, FlashAttention-3, arXiv:2407.08608, sections 3.1, 3.2).
``PERSISTENT``: as many programs as the GPU has multiprocessors, each with a list of tiles; the loading warp is already at the
next tile when the groups end one.

Shapes and descriptors as in flash_attention_tma_triton.py. Keys are walked from the last to the first, so the masked tiles
come first; a program without any key (causal, n > m) still takes one tile, all of it masked.
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
GROUP_ROWS = gl.constexpr(64)
"""Query rows of a group: what one instruction multiplies."""
THREADS_OF_ROW = gl.constexpr(
    gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4]
    )
)
"""[rows, 4]: the threads that hold a row of a product's result (PTX ISA, wgmma.mma_async, matrix D)."""
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # its name from Triton 3.7 on, and before


@gluon.jit
def _tiles_of_program(TABLE, most, PERSISTENT: gl.constexpr):
    """How many tiles of queries this program takes, and where their numbers stand."""
    if PERSISTENT:
        mine = TABLE + gl.program_id(0) * most
        return gl.load(mine), mine + 1
    else:
        return 1, TABLE


@gluon.jit
def _number(mine, turn, PERSISTENT: gl.constexpr):
    """The tile that is this program's next."""
    if PERSISTENT:
        return gl.load(mine + turn)
    else:
        return gl.program_id(0)


@gluon.jit
def _place(number, n, heads, all_heads, BLOCK_M: gl.constexpr, HEADS_AT_ONCE: gl.constexpr):
    """First row, batch and head of a tile: a few heads at a time, their longest rows (the last) first."""
    blocks = gl.cdiv(n, BLOCK_M)
    first_head = number // (HEADS_AT_ONCE * blocks) * HEADS_AT_ONCE
    here = gl.minimum(HEADS_AT_ONCE, all_heads - first_head)
    place = number - first_head * blocks
    batch_head = first_head + place % here
    return (blocks - 1 - place // here) * BLOCK_M, batch_head // heads, batch_head % heads


@gluon.jit
def _tile_numbers(first, n, m, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """How many key tiles these rows need, and how many of them every row sees whole."""
    stop, whole = m, m
    if CAUSAL:
        stop = gl.minimum(m, gl.maximum(0, first + BLOCK_M + (m - n)))
        whole = gl.minimum(m, gl.maximum(0, first + (m - n) + 1))
    tiles = gl.maximum(1, gl.cdiv(stop, BLOCK_N))
    return tiles, gl.minimum(tiles - 1, whole // BLOCK_N)


@gluon.jit
def _load_query(Q, q_tiles, q_full, q_empty, turn, batch, head, row, member: gl.constexpr):
    mbarrier.wait(q_empty.index(member), (turn & 1) ^ 1)
    mbarrier.expect(q_full.index(member), Q.block_type.nbytes)
    tma.async_copy_global_to_shared(
        Q, [batch, head, row + member * GROUP_ROWS, 0], q_full.index(member), q_tiles.index(member)
    )


@gluon.jit
def _load_tiles(
    Q, K, V, TABLE, q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    n, m, heads, all_heads, group, most,
    GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    HEADS_AT_ONCE: gl.constexpr, PERSISTENT: gl.constexpr,
):  # fmt: skip
    """The loading warp: each group's q, keys and values, as the groups free their places."""
    BLOCK_M: gl.constexpr = GROUPS * GROUP_ROWS
    count, mine = _tiles_of_program(TABLE, most, PERSISTENT)
    done = 0
    for turn in range(count):
        first, batch, head = _place(
            _number(mine, turn, PERSISTENT), n, heads, all_heads, BLOCK_M, HEADS_AT_ONCE
        )
        tiles, _ = _tile_numbers(first, n, m, BLOCK_M, BLOCK_N, CAUSAL)
        kv_head = head // group
        _load_query(Q, q_tiles, q_full, q_empty, turn, batch, head, first, 0)
        for step in range(tiles):
            key = (tiles - 1 - step) * BLOCK_N
            slot, phase = (done + step) % STAGES, ((done + step) // STAGES) & 1
            mbarrier.wait(k_empty.index(slot), phase ^ 1)
            mbarrier.expect(k_full.index(slot), K.block_type.nbytes)
            tma.async_copy_global_to_shared(
                K, [batch, kv_head, key, 0], k_full.index(slot), k_tiles.index(slot)
            )
            if step == 0:  # the first group may begin before the others' queries have come
                for member in gl.static_range(1, GROUPS):
                    _load_query(Q, q_tiles, q_full, q_empty, turn, batch, head, first, member)
            mbarrier.wait(v_empty.index(slot), phase ^ 1)
            mbarrier.expect(v_full.index(slot), V.block_type.nbytes)
            tma.async_copy_global_to_shared(
                V, [batch, kv_head, key, 0], v_full.index(slot), v_tiles.index(slot)
            )
        done += tiles


@gluon.jit
def _probabilities(
    scores, row_max, row_sum, rows, key, n, m, scale_log2, keys_layout: gl.constexpr,
    BLOCK_N: gl.constexpr, MASKED: gl.constexpr, CAUSAL: gl.constexpr, SHORT: gl.constexpr,
):  # fmt: skip
    """exp2 of the scores, their rows' new maximum and sum, and by what earlier results shrink."""
    if MASKED:
        keys = key + gl.arange(0, BLOCK_N, keys_layout)
        last = m - 1
        if CAUSAL:
            last = gl.minimum(rows + (m - n), m - 1)[:, None]
        seen = keys[None, :] <= last
        scores = gl.where(seen, scores, float("-inf"))
    if SHORT:  # four chains of comparisons beside one another
        largest = gl.max(gl.max(scores.reshape([GROUP_ROWS, 4, BLOCK_N // 4]), 1), 1)
        largest = gl.convert_layout(largest, row_max.type.layout, assert_trivial=True)
    else:
        largest = gl.max(scores, 1)
    new_max = gl.maximum(row_max, largest * scale_log2)
    offset = new_max
    if MASKED:  # a row that has seen nothing yet: exp2(-inf - 0) is 0, exp2(-inf - -inf) would be no number
        offset = gl.where(new_max == float("-inf"), 0.0, new_max)
    p = gl.exp2(scores * scale_log2 - offset[:, None])
    shrink = gl.exp2(row_max - offset)
    if SHORT:
        parts = gl.sum(gl.sum(p.reshape([GROUP_ROWS, BLOCK_N // 8, 4, 2]), 3), 1)
        layout: gl.constexpr = gl.SliceLayout(1, row_sum.type.layout)
        shrinks = gl.convert_layout(shrink, layout, assert_trivial=True)[:, None]
        row_sum = row_sum * shrinks + gl.convert_layout(parts, row_sum.type.layout, assert_trivial=True)
    else:
        row_sum = row_sum * shrink + gl.sum(p, 1)
    return p, new_max, row_sum, shrink


@gluon.jit
def _release(barrier):
    """All warps of the group are through with what the barrier guards."""
    _barrier()
    mbarrier.arrive(barrier, count=1)


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
def _operand(p, dtype: gl.constexpr, p_layout: gl.constexpr, PACKED: gl.constexpr):
    """Probabilities, fp32 or ``_packed``, as the product takes them."""
    if PACKED:
        low, high = gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [p], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
        )
        halves = gl.join(low.to(dtype, bitcast=True), high.to(dtype, bitcast=True))
        return gl.convert_layout(halves.reshape([GROUP_ROWS, 2 * p.shape[1]]), p_layout, assert_trivial=True)
    else:
        return gl.convert_layout(p.to(dtype), p_layout)


@gluon.jit
def _steps(
    acc, p, shrink, row_max, row_sum, q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, turns,
    start, stop, tiles, done, turn, rows, n, m, scale_log2,
    member: gl.constexpr, s_layout: gl.constexpr, o_layout: gl.constexpr, p_layout: gl.constexpr,
    GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, TAKE_TURNS: gl.constexpr, LATE: gl.constexpr, SHORT: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Steps ``start`` to ``stop``: scores of this step's keys beside the last step's probabilities times values."""
    for step in range(start, stop):
        slot, phase = (done + step) % STAGES, ((done + step) // STAGES) & 1
        old_slot = (done + step - 1) % STAGES
        k = k_tiles.index(slot).reshape([BLOCK_N, BLOCK_D]).permute((1, 0))
        v = v_tiles.index(old_slot).reshape([BLOCK_N, BLOCK_D])
        mbarrier.wait(k_full.index(slot), phase)
        if TAKE_TURNS:
            mbarrier.wait(turns.index(member), (done - turn + step - 1) & 1)
        scores = warpgroup_mma(
            q, k, gl.zeros([GROUP_ROWS, BLOCK_N], gl.float32, s_layout), use_acc=False, is_async=True
        )
        if LATE >= 1:  # under the product just begun
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
        probabilities = _operand(p, v_tiles.dtype, p_layout, LATE < 2)
        acc = warpgroup_mma(probabilities, v, acc, is_async=True)
        if TAKE_TURNS:
            _release(turns.index((member + 1) % GROUPS))
        scores = warpgroup_mma_wait(1, deps=(scores,))
        _release(k_empty.index(slot))
        new_p, row_max, row_sum, shrink = _probabilities(
            scores, row_max, row_sum, rows, (tiles - 1 - step) * BLOCK_N, n, m, scale_log2,
            gl.SliceLayout(0, s_layout), BLOCK_N, MASKED, CAUSAL, SHORT,
        )  # fmt: skip
        # This step's values, wanted next: the loop in this wait keeps ptxas from waiting for the product above before the softmax.
        mbarrier.wait(v_full.index(slot), phase)
        acc, probabilities = warpgroup_mma_wait(
            0, deps=(acc, probabilities)
        )  # their registers were read until here
        _release(v_empty.index(old_slot))
        if LATE == 0:
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
        p = new_p
        if LATE < 2:
            p = _packed(p, v_tiles.dtype)
    return acc, p, shrink, row_max, row_sum


@gluon.jit
def _compute(
    OUT, LSE, TABLE, q_tiles, o_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty, turns,
    scale_log2, n, m, heads, all_heads, most, member: gl.constexpr,
    GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, HEADS_AT_ONCE: gl.constexpr, PERSISTENT: gl.constexpr, TAKE_TURNS: gl.constexpr,
    LATE: gl.constexpr, SHORT: gl.constexpr,
):  # fmt: skip
    """One group: 64 query rows of each of the program's tiles, from the first score to the stored output."""
    BLOCK_M: gl.constexpr = GROUPS * GROUP_ROWS
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    q = q_tiles.index(member).reshape([GROUP_ROWS, BLOCK_D])
    out_tile = o_tiles.index(member).reshape([GROUP_ROWS, BLOCK_D])
    count, mine = _tiles_of_program(TABLE, most, PERSISTENT)
    done = 0
    for turn in range(count):
        first, batch, head = _place(
            _number(mine, turn, PERSISTENT), n, heads, all_heads, BLOCK_M, HEADS_AT_ONCE
        )
        tiles, whole = _tile_numbers(first, n, m, BLOCK_M, BLOCK_N, CAUSAL)
        rows = first + member * GROUP_ROWS + gl.arange(0, GROUP_ROWS, row_layout)
        row_max = gl.full([GROUP_ROWS], float("-inf"), gl.float32, row_layout)
        if SHORT:  # a sum for each of the four threads of a row
            row_sum = gl.zeros([GROUP_ROWS, 4], gl.float32, THREADS_OF_ROW)
        else:
            row_sum = gl.zeros([GROUP_ROWS], gl.float32, row_layout)
        acc = gl.zeros([GROUP_ROWS, BLOCK_D], gl.float32, o_layout)

        slot, phase = done % STAGES, (done // STAGES) & 1
        mbarrier.wait(q_full.index(member), turn & 1)
        mbarrier.wait(k_full.index(slot), phase)
        scores = warpgroup_mma(
            q, k_tiles.index(slot).reshape([BLOCK_N, BLOCK_D]).permute((1, 0)),
            gl.zeros([GROUP_ROWS, BLOCK_N], gl.float32, s_layout), use_acc=False, is_async=True,
        )  # fmt: skip
        scores = warpgroup_mma_wait(0, deps=(scores,))
        _release(k_empty.index(slot))
        p, row_max, row_sum, shrink = _probabilities(
            scores, row_max, row_sum, rows, (tiles - 1) * BLOCK_N, n, m, scale_log2,
            gl.SliceLayout(0, s_layout), BLOCK_N, True, CAUSAL, SHORT,
        )  # fmt: skip
        if LATE < 2:
            p = _packed(p, v_tiles.dtype)
        mbarrier.wait(v_full.index(slot), phase)
        acc, p, shrink, row_max, row_sum = _steps(
            acc, p, shrink, row_max, row_sum, q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, turns,
            1, tiles - whole, tiles, done, turn, rows, n, m, scale_log2, member, s_layout, o_layout, p_layout,
            GROUPS, BLOCK_N, BLOCK_D, STAGES, CAUSAL, TAKE_TURNS, LATE, SHORT, True,
        )  # fmt: skip
        acc, p, shrink, row_max, row_sum = _steps(
            acc, p, shrink, row_max, row_sum, q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, turns,
            tiles - whole, tiles, tiles, done, turn, rows, n, m, scale_log2, member, s_layout, o_layout, p_layout,
            GROUPS, BLOCK_N, BLOCK_D, STAGES, CAUSAL, TAKE_TURNS, LATE, SHORT, False,
        )  # fmt: skip
        if PERSISTENT:
            _release(q_empty.index(member))
        if LATE >= 1:
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
        last = (done + tiles - 1) % STAGES
        probabilities = _operand(p, v_tiles.dtype, p_layout, LATE < 2)
        acc = warpgroup_mma(
            probabilities, v_tiles.index(last).reshape([BLOCK_N, BLOCK_D]), acc, is_async=True
        )
        acc, probabilities = warpgroup_mma_wait(0, deps=(acc, probabilities))
        if PERSISTENT:
            _release(v_empty.index(last))

        if SHORT:
            row_sum = gl.convert_layout(gl.sum(row_sum, 1), row_layout)
        none = row_sum == 0.0
        total = gl.where(none, 1.0, row_sum)
        lse = gl.where(none, float("-inf"), (row_max + gl.log2(total)) * LN_2)
        at = (batch * heads + head).to(gl.int64) * n + rows
        gl.store(LSE + at, lse, mask=rows < n)
        out = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, o_layout))[:, None]
        if PERSISTENT:
            tma.store_wait(0)
            _barrier()
        out_tile.store(out.to(q_tiles.dtype))
        fence_async_shared()
        _barrier()
        tma.async_copy_shared_to_global(
            OUT, [batch, head, first + member * GROUP_ROWS, 0], o_tiles.index(member)
        )
        done += tiles
    tma.store_wait(0)


@gluon.jit
def forward_gluon_kernel(
    Q, K, V, OUT, LSE, TABLE, scale_log2, n, m, heads, all_heads, group, most,
    GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, HEADS_AT_ONCE: gl.constexpr, PERSISTENT: gl.constexpr, TAKE_TURNS: gl.constexpr,
    LATE: gl.constexpr, SHORT: gl.constexpr,
):  # fmt: skip
    """A program takes GROUPS x 64 query rows of one head or, ``PERSISTENT``, as many such tiles as TABLE gives it."""
    q_tiles = gl.allocate_shared_memory(Q.dtype, [GROUPS] + Q.block_type.shape, Q.layout)
    o_tiles = q_tiles  # the queries are read when the output comes, and only then does it need their place
    if PERSISTENT:
        o_tiles = gl.allocate_shared_memory(Q.dtype, [GROUPS] + Q.block_type.shape, Q.layout)
    k_tiles = gl.allocate_shared_memory(K.dtype, [STAGES] + K.block_type.shape, K.layout)
    v_tiles = gl.allocate_shared_memory(V.dtype, [STAGES] + V.block_type.shape, V.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(k_full.index(slot), count=1)
        mbarrier.init(v_full.index(slot), count=1)
        mbarrier.init(k_empty.index(slot), count=GROUPS)
        mbarrier.init(v_empty.index(slot), count=GROUPS)
    for member in gl.static_range(GROUPS):
        mbarrier.init(q_full.index(member), count=1)
        mbarrier.init(q_empty.index(member), count=1)
        mbarrier.init(turns.index(member), count=1)
    fence_async_shared()
    _barrier()
    mbarrier.arrive(turns.index(0), count=1)  # the first group may start
    # Whole tuples: in Triton 3.6 one that is put together from others loses which of its parts are constants.
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_compute, (OUT, LSE, TABLE, q_tiles, o_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty,
                            v_full, v_empty, turns, scale_log2, n, m, heads, all_heads, most, 0, GROUPS, BLOCK_N,
                            BLOCK_D, STAGES, CAUSAL, HEADS_AT_ONCE, PERSISTENT, TAKE_TURNS, LATE, SHORT)),
                (_compute, (OUT, LSE, TABLE, q_tiles, o_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty,
                            v_full, v_empty, turns, scale_log2, n, m, heads, all_heads, most, 1, GROUPS, BLOCK_N,
                            BLOCK_D, STAGES, CAUSAL, HEADS_AT_ONCE, PERSISTENT, TAKE_TURNS, LATE, SHORT)),
                (_load_tiles, (Q, K, V, TABLE, q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty,
                               v_full, v_empty, n, m, heads, all_heads, group, most, GROUPS, BLOCK_N, STAGES,
                               CAUSAL, HEADS_AT_ONCE, PERSISTENT)),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip
    else:
        gl.static_assert(GROUPS == 3)
        gl.warp_specialize(
            [
                (_compute, (OUT, LSE, TABLE, q_tiles, o_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty,
                            v_full, v_empty, turns, scale_log2, n, m, heads, all_heads, most, 0, GROUPS, BLOCK_N,
                            BLOCK_D, STAGES, CAUSAL, HEADS_AT_ONCE, PERSISTENT, TAKE_TURNS, LATE, SHORT)),
                (_compute, (OUT, LSE, TABLE, q_tiles, o_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty,
                            v_full, v_empty, turns, scale_log2, n, m, heads, all_heads, most, 1, GROUPS, BLOCK_N,
                            BLOCK_D, STAGES, CAUSAL, HEADS_AT_ONCE, PERSISTENT, TAKE_TURNS, LATE, SHORT)),
                (_compute, (OUT, LSE, TABLE, q_tiles, o_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty,
                            v_full, v_empty, turns, scale_log2, n, m, heads, all_heads, most, 2, GROUPS, BLOCK_N,
                            BLOCK_D, STAGES, CAUSAL, HEADS_AT_ONCE, PERSISTENT, TAKE_TURNS, LATE, SHORT)),
                (_load_tiles, (Q, K, V, TABLE, q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty,
                               v_full, v_empty, n, m, heads, all_heads, group, most, GROUPS, BLOCK_N, STAGES,
                               CAUSAL, HEADS_AT_ONCE, PERSISTENT)),
            ],
            [4, 4, 1], [160, 160, 32],
        )  # fmt: skip
