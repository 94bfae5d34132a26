# Gluon's compiler reads these functions, and it knows neither starred lists nor Python's types.
# ruff: noqa: RUF005
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false
"""FlashAttention's forward for Hopper in Gluon: one warp loads by TMA, two or three groups of four warps compute.

Each group owns 64 query rows. While the tensor cores multiply scores of the next keys and the probabilities of the last, the
group computes the softmax between them; with ``TAKE_TURNS`` the groups start their products one after the other, so that
one's softmax runs under the other's products (Shah et al. 2024, FlashAttention-3, arXiv:2407.08608, sections 3.1, 3.2).

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
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # its name from Triton 3.7 on, and before


@gluon.jit
def _place(n, heads, all_heads, BLOCK_M: gl.constexpr, HEADS_AT_ONCE: gl.constexpr):
    """First row, batch and head of this program: a few heads at a time, their longest rows (the last) first."""
    blocks = gl.cdiv(n, BLOCK_M)
    program = gl.program_id(0)
    first_head = program // (HEADS_AT_ONCE * blocks) * HEADS_AT_ONCE
    here = gl.minimum(HEADS_AT_ONCE, all_heads - first_head)
    place = program - first_head * blocks
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
def _load_tiles(
    Q, K, V, q_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full, v_empty, n, m, heads, all_heads, group,
    GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    HEADS_AT_ONCE: gl.constexpr,
):  # fmt: skip
    """The loading warp: q once, then keys and values as the groups free their places."""
    BLOCK_M: gl.constexpr = GROUPS * GROUP_ROWS
    first, batch, head = _place(n, heads, all_heads, BLOCK_M, HEADS_AT_ONCE)
    tiles, _ = _tile_numbers(first, n, m, BLOCK_M, BLOCK_N, CAUSAL)
    kv_head = head // group
    mbarrier.expect(q_full, GROUPS * Q.block_type.nbytes)
    for member in gl.static_range(GROUPS):
        tma.async_copy_global_to_shared(
            Q, [batch, head, first + member * GROUP_ROWS, 0], q_full, q_tiles.index(member)
        )
    for step in range(tiles):
        key = (tiles - 1 - step) * BLOCK_N
        slot, phase = step % STAGES, (step // STAGES) & 1
        mbarrier.wait(k_empty.index(slot), phase ^ 1)
        mbarrier.expect(k_full.index(slot), K.block_type.nbytes)
        tma.async_copy_global_to_shared(K, [batch, kv_head, key, 0], k_full.index(slot), k_tiles.index(slot))
        mbarrier.wait(v_empty.index(slot), phase ^ 1)
        mbarrier.expect(v_full.index(slot), V.block_type.nbytes)
        tma.async_copy_global_to_shared(V, [batch, kv_head, key, 0], v_full.index(slot), v_tiles.index(slot))


@gluon.jit
def _probabilities(
    scores, row_max, row_sum, rows, key, n, m, scale_log2, keys_layout: gl.constexpr,
    BLOCK_N: gl.constexpr, MASKED: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """exp2 of the scores, their rows' new maximum and sum, and by what earlier results shrink."""
    if MASKED:
        keys = key + gl.arange(0, BLOCK_N, keys_layout)
        seen = (keys < m)[None, :]
        if CAUSAL:
            seen = seen & (rows[:, None] + (m - n) >= keys[None, :])
        scores = gl.where(seen, scores, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(scores, 1) * scale_log2)
    offset = new_max
    if MASKED:  # a row that has seen nothing yet: exp2(-inf - 0) is 0, exp2(-inf - -inf) would be no number
        offset = gl.where(new_max == float("-inf"), 0.0, new_max)
    p = gl.exp2(scores * scale_log2 - offset[:, None])
    shrink = gl.exp2(row_max - offset)
    return p, new_max, row_sum * shrink + gl.sum(p, 1), shrink


@gluon.jit
def _release(barrier):
    """All warps of the group are through with what the barrier guards."""
    _barrier()
    mbarrier.arrive(barrier, count=1)


@gluon.jit
def _steps(
    acc, p, row_max, row_sum, q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, turns,
    start, stop, tiles, rows, n, m, scale_log2,
    member: gl.constexpr, s_layout: gl.constexpr, o_layout: gl.constexpr, p_layout: gl.constexpr,
    GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, TAKE_TURNS: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Steps ``start`` to ``stop``: scores of this step's keys beside the last step's probabilities times values."""
    for step in range(start, stop):
        slot, phase = step % STAGES, (step // STAGES) & 1
        old_slot, old_phase = (step - 1) % STAGES, ((step - 1) // STAGES) & 1
        k = k_tiles.index(slot).reshape([BLOCK_N, BLOCK_D]).permute((1, 0))
        v = v_tiles.index(old_slot).reshape([BLOCK_N, BLOCK_D])
        mbarrier.wait(k_full.index(slot), phase)
        if TAKE_TURNS:
            mbarrier.wait(turns.index(member), (step - 1) & 1)
        scores = warpgroup_mma(
            q, k, gl.zeros([GROUP_ROWS, BLOCK_N], gl.float32, s_layout), use_acc=False, is_async=True
        )
        acc = warpgroup_mma(p, v, acc, is_async=True)
        if TAKE_TURNS:
            _release(turns.index((member + 1) % GROUPS))
        scores = warpgroup_mma_wait(1, deps=(scores,))
        _release(k_empty.index(slot))
        prob, row_max, row_sum, shrink = _probabilities(
            scores, row_max, row_sum, rows, (tiles - 1 - step) * BLOCK_N, n, m, scale_log2,
            gl.SliceLayout(0, s_layout), BLOCK_N, MASKED, CAUSAL,
        )  # fmt: skip
        mbarrier.wait(v_full.index(slot), phase)
        acc, p = warpgroup_mma_wait(0, deps=(acc, p))  # the product read p's registers until here
        _release(v_empty.index(old_slot))
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
        p = gl.convert_layout(prob.to(v_tiles.dtype), p_layout)
    return acc, p, row_max, row_sum


@gluon.jit
def _compute(
    OUT, LSE, q_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full, v_empty, turns,
    scale_log2, n, m, heads, all_heads, member: gl.constexpr,
    GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, HEADS_AT_ONCE: gl.constexpr, TAKE_TURNS: gl.constexpr,
):  # fmt: skip
    """One group: 64 query rows from the first score to the stored output."""
    BLOCK_M: gl.constexpr = GROUPS * GROUP_ROWS
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    first, batch, head = _place(n, heads, all_heads, BLOCK_M, HEADS_AT_ONCE)
    tiles, whole = _tile_numbers(first, n, m, BLOCK_M, BLOCK_N, CAUSAL)
    rows = first + member * GROUP_ROWS + gl.arange(0, GROUP_ROWS, row_layout)
    q = q_tiles.index(member).reshape([GROUP_ROWS, BLOCK_D])
    row_max = gl.full([GROUP_ROWS], float("-inf"), gl.float32, row_layout)
    row_sum = gl.zeros([GROUP_ROWS], gl.float32, row_layout)
    acc = gl.zeros([GROUP_ROWS, BLOCK_D], gl.float32, o_layout)

    mbarrier.wait(q_full, 0)
    mbarrier.wait(k_full.index(0), 0)
    scores = warpgroup_mma(
        q, k_tiles.index(0).reshape([BLOCK_N, BLOCK_D]).permute((1, 0)),
        gl.zeros([GROUP_ROWS, BLOCK_N], gl.float32, s_layout), use_acc=False, is_async=True,
    )  # fmt: skip
    scores = warpgroup_mma_wait(0, deps=(scores,))
    _release(k_empty.index(0))
    prob, row_max, row_sum, _ = _probabilities(
        scores, row_max, row_sum, rows, (tiles - 1) * BLOCK_N, n, m, scale_log2,
        gl.SliceLayout(0, s_layout), BLOCK_N, True, CAUSAL,
    )  # fmt: skip
    p = gl.convert_layout(prob.to(v_tiles.dtype), p_layout)
    mbarrier.wait(v_full.index(0), 0)
    acc, p, row_max, row_sum = _steps(
        acc, p, row_max, row_sum, q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, turns,
        1, tiles - whole, tiles, rows, n, m, scale_log2, member, s_layout, o_layout, p_layout,
        GROUPS, BLOCK_N, BLOCK_D, STAGES, CAUSAL, TAKE_TURNS, True,
    )  # fmt: skip
    acc, p, row_max, row_sum = _steps(
        acc, p, row_max, row_sum, q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, turns,
        tiles - whole, tiles, tiles, rows, n, m, scale_log2, member, s_layout, o_layout, p_layout,
        GROUPS, BLOCK_N, BLOCK_D, STAGES, CAUSAL, TAKE_TURNS, False,
    )  # fmt: skip
    last = tiles - 1
    acc = warpgroup_mma(p, v_tiles.index(last % STAGES).reshape([BLOCK_N, BLOCK_D]), acc, is_async=True)
    acc, p = warpgroup_mma_wait(0, deps=(acc, p))

    none = row_sum == 0.0
    total = gl.where(none, 1.0, row_sum)
    lse = gl.where(none, float("-inf"), (row_max + gl.log2(total)) * LN_2)
    at = (batch * heads + head).to(gl.int64) * n + rows
    gl.store(LSE + at, lse, mask=rows < n)
    out = acc / gl.convert_layout(total, gl.SliceLayout(1, o_layout))[:, None]
    q.store(out.to(q_tiles.dtype))  # this group's queries are read: their place takes the output on its way
    fence_async_shared()
    _barrier()
    tma.async_copy_shared_to_global(OUT, [batch, head, first + member * GROUP_ROWS, 0], q_tiles.index(member))
    tma.store_wait(0)


@gluon.jit
def forward_gluon_kernel(
    Q, K, V, OUT, LSE, scale_log2, n, m, heads, all_heads, group,
    GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, HEADS_AT_ONCE: gl.constexpr, TAKE_TURNS: gl.constexpr,
):  # fmt: skip
    """One program: GROUPS x 64 query rows of one head."""
    q_tiles = gl.allocate_shared_memory(Q.dtype, [GROUPS] + Q.block_type.shape, Q.layout)
    k_tiles = gl.allocate_shared_memory(K.dtype, [STAGES] + K.block_type.shape, K.layout)
    v_tiles = gl.allocate_shared_memory(V.dtype, [STAGES] + V.block_type.shape, V.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(k_full.index(slot), count=1)
        mbarrier.init(v_full.index(slot), count=1)
        mbarrier.init(k_empty.index(slot), count=GROUPS)
        mbarrier.init(v_empty.index(slot), count=GROUPS)
    for member in gl.static_range(GROUPS):
        mbarrier.init(turns.index(member), count=1)
    fence_async_shared()
    _barrier()
    mbarrier.arrive(turns.index(0), count=1)  # the first group may start
    # Whole tuples: in Triton 3.6 one that is put together from others loses which of its parts are constants.
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_compute, (OUT, LSE, q_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full, v_empty, turns,
                            scale_log2, n, m, heads, all_heads, 0,
                            GROUPS, BLOCK_N, BLOCK_D, STAGES, CAUSAL, HEADS_AT_ONCE, TAKE_TURNS)),
                (_compute, (OUT, LSE, q_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full, v_empty, turns,
                            scale_log2, n, m, heads, all_heads, 1,
                            GROUPS, BLOCK_N, BLOCK_D, STAGES, CAUSAL, HEADS_AT_ONCE, TAKE_TURNS)),
                (_load_tiles, (Q, K, V, q_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full, v_empty,
                               n, m, heads, all_heads, group, GROUPS, BLOCK_N, STAGES, CAUSAL, HEADS_AT_ONCE)),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip
    else:
        gl.static_assert(GROUPS == 3)
        gl.warp_specialize(
            [
                (_compute, (OUT, LSE, q_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full, v_empty, turns,
                            scale_log2, n, m, heads, all_heads, 0,
                            GROUPS, BLOCK_N, BLOCK_D, STAGES, CAUSAL, HEADS_AT_ONCE, TAKE_TURNS)),
                (_compute, (OUT, LSE, q_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full, v_empty, turns,
                            scale_log2, n, m, heads, all_heads, 1,
                            GROUPS, BLOCK_N, BLOCK_D, STAGES, CAUSAL, HEADS_AT_ONCE, TAKE_TURNS)),
                (_compute, (OUT, LSE, q_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full, v_empty, turns,
                            scale_log2, n, m, heads, all_heads, 2,
                            GROUPS, BLOCK_N, BLOCK_D, STAGES, CAUSAL, HEADS_AT_ONCE, TAKE_TURNS)),
                (_load_tiles, (Q, K, V, q_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full, v_empty,
                               n, m, heads, all_heads, group, GROUPS, BLOCK_N, STAGES, CAUSAL, HEADS_AT_ONCE)),
            ],
            [4, 4, 1], [160, 160, 32],
        )  # fmt: skip
