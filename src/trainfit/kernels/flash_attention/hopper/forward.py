# Gluon's compiler supports neither starred lists nor Python's types in these functions.
# ruff: noqa: RUF005
# pyright: reportCallIssue=false, reportArgumentType=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false
"""FlashAttention's forward for Hopper in Gluon: one warp loads by TMA, groups of four warps compute.

Each group owns 64 query rows. While the tensor cores multiply probabilities by values, the group computes the
softmax of the next keys (Shah et al. 2024, FlashAttention-3, arXiv:2407.08608, section 3.2). The accumulator
is rescaled only where a maximum grew by a factor over 2^8, and a row's four threads add their sums at the
end.

Head size 128 takes two groups and one persistent program per multiprocessor with a list of tiles
(schedule.py): the loading warp runs ahead, and the groups overlap the next tile's first scores with the last
product of a tile, so queries are double-buffered. Head size 64 takes three groups, one program per tile.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from trainfit.kernels.flash_attention.hopper.pipeline import (
    GROUP_ROWS,
    GROUP_THREADS,
    NAMED,
    _added,
    _all_steps,
    _barrier,
    _finish,
    _first_step,
    _free,
    _load,
    _position,
    _release,
    _scores,
    _tile_numbers,
    _wait_for,
)

GROUPS = gl.constexpr(2)


@gluon.jit
def _count(n, all_heads, shift):
    """Return the number of tiles of queries of this program."""
    tiles, programs = gl.cdiv(n, GROUPS * GROUP_ROWS) * all_heads, gl.num_programs(0)
    turns = tiles // programs
    return turns + ((gl.program_id(0) + turns * shift) % programs < tiles - turns * programs).to(gl.int32)


@gluon.jit
def _number(turn, shift):
    """Return the number of this program's tile ``turn``; programs rotate by ``shift`` each turn."""
    programs = gl.num_programs(0)
    return turn * programs + (gl.program_id(0) + turn * shift) % programs


@gluon.jit
def _query_buffer(turn, member: gl.constexpr):
    """Return the buffer of a group's queries of tile ``turn``, and the phase of its barriers."""
    return (turn & 1) * GROUPS + member, (turn >> 1) & 1


@gluon.jit
def _load_query(Q, q_tiles, q_full, q_empty, turn, batch, head, first, member: gl.constexpr):
    buffer, phase = _query_buffer(turn, member)
    mbarrier.wait(q_empty.index(buffer), phase ^ 1)
    _load(Q, q_tiles, q_full, buffer, batch, head, first + member * GROUP_ROWS)


@gluon.jit
def _load_tiles(
    Q, K, V, q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    n, m, heads, all_heads, group, shift,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, HEADS_AT_ONCE: gl.constexpr,
):  # fmt: skip
    """Load each group's queries, keys and values as the groups release their buffers (loading warp)."""
    done = 0
    for turn in range(_count(n, all_heads, shift)):
        first, batch, head = _position(_number(turn, shift), n, heads, all_heads, GROUPS, HEADS_AT_ONCE, True)
        tiles, _ = _tile_numbers(first, n, m, GROUPS, BLOCK_N, CAUSAL)
        kv_head = head // group
        _load_query(Q, q_tiles, q_full, q_empty, turn, batch, head, first, 0)
        for step in range(tiles):
            key = (tiles - 1 - step) * BLOCK_N
            stage, phase = (done + step) % STAGES, ((done + step) // STAGES) & 1
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            _load(K, k_tiles, k_full, stage, batch, kv_head, key)
            if step == 0:  # the first group starts before the other's queries arrive
                _load_query(Q, q_tiles, q_full, q_empty, turn, batch, head, first, 1)
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            _load(V, v_tiles, v_full, stage, batch, kv_head, key)
        done += tiles


@gluon.jit
def _compute_tiles(
    OUT, LSE, q_tiles, o_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    scale_log2, n, m, heads, all_heads, shift, member: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, HEADS_AT_ONCE: gl.constexpr,
):  # fmt: skip
    """Compute 64 query rows of each of the program's tiles (one group)."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    rows = member * GROUP_ROWS + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, s_layout))
    count = _count(n, all_heads, shift)
    first, batch, head = _position(_number(0, shift), n, heads, all_heads, GROUPS, HEADS_AT_ONCE, True)
    tiles, _ = _tile_numbers(first, n, m, GROUPS, BLOCK_N, CAUSAL)
    mbarrier.wait(q_full.index(member), 0)
    mbarrier.wait(k_full.index(0), 0)
    scores = _scores(q_tiles, k_tiles, member, 0, s_layout, BLOCK_N, BLOCK_D)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    _release(k_empty.index(0))
    p, row_max, row_sum, shrink = _first_step(
        scores, first + rows, tiles, n, m, scale_log2, s_layout, BLOCK_N, CAUSAL, v_tiles.dtype
    )
    done = 0
    for turn in range(count):
        buffer, _ = _query_buffer(turn, member)
        # Computed again: carried through the loop, ``whole`` keeps its first value in Triton 3.6, and the
        # groups would wait for keys that are never loaded.
        tiles, whole = _tile_numbers(first, n, m, GROUPS, BLOCK_N, CAUSAL)
        acc, p, shrink, row_max, row_sum = _all_steps(
            p, shrink, row_max, row_sum, q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
            whole, tiles, done, buffer, first + rows, n, m, scale_log2, s_layout, o_layout, p_layout,
            GROUPS, BLOCK_N, BLOCK_D, STAGES, CAUSAL, True,
        )  # fmt: skip
        _release(q_empty.index(buffer))
        last = (done + tiles - 1) % STAGES
        done += tiles
        # After the last tile the code below runs once more, on stale buffers; its result is not used.
        has_next = (turn + 1 < count).to(gl.int32)
        next_first, next_batch, next_head = _position(
            _number(turn + has_next, shift), n, heads, all_heads, GROUPS, HEADS_AT_ONCE, True
        )
        next_tiles, _ = _tile_numbers(next_first, n, m, GROUPS, BLOCK_N, CAUSAL)
        next_buffer, next_phase = _query_buffer(turn + 1, member)
        mbarrier.wait(q_full.index(next_buffer), next_phase, pred=has_next > 0)
        mbarrier.wait(k_full.index(done % STAGES), (done // STAGES) & 1, pred=has_next > 0)
        scores = _scores(q_tiles, k_tiles, next_buffer, done % STAGES, s_layout, BLOCK_N, BLOCK_D)
        acc, probabilities = _added(acc, p, shrink, v_tiles, last, p_layout, BLOCK_N, BLOCK_D)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        _release(k_empty.index(done % STAGES))
        p, next_max, next_sum, shrink = _first_step(
            scores, next_first + rows, next_tiles, n, m, scale_log2, s_layout, BLOCK_N, CAUSAL, v_tiles.dtype
        )
        acc, probabilities = warpgroup_mma_wait(0, deps=(acc, probabilities))
        _release(v_empty.index(last))
        _finish(
            OUT, LSE, o_tiles, acc, row_max, row_sum, first, batch, head, heads, n, member, s_layout,
            True, BLOCK_D
        )  # fmt: skip
        first, batch, head = next_first, next_batch, next_head
        row_max, row_sum = next_max, next_sum
    tma.store_wait(0)


@gluon.jit
def _until_free(barrier, stage, step, GROUPS: gl.constexpr, STAGES: gl.constexpr):
    """Wait, in the loading warp, until all groups have released the buffer that load ``step`` overwrites."""
    if step >= STAGES:
        _wait_for(barrier + stage, GROUPS * GROUP_THREADS + 32, 1)


@gluon.jit
def _load_tile(
    Q, K, V, q_tiles, k_tiles, v_tiles, q_full, k_full, v_full, n, m, heads, all_heads, group,
    GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    HEADS_AT_ONCE: gl.constexpr,
):  # fmt: skip
    """Load each group's queries, and keys and values as the groups release their buffers (loading warp)."""
    first, batch, head = _position(gl.program_id(0), n, heads, all_heads, GROUPS, HEADS_AT_ONCE, False)
    tiles, _ = _tile_numbers(first, n, m, GROUPS, BLOCK_N, CAUSAL)
    kv_head = head // group
    _load(Q, q_tiles, q_full, 0, batch, head, first)
    for step in range(tiles):
        key = (tiles - 1 - step) * BLOCK_N
        stage = step % STAGES
        _until_free(NAMED, stage, step, GROUPS, STAGES)
        _load(K, k_tiles, k_full, stage, batch, kv_head, key)
        if step == 0:  # the first group starts before the others' queries arrive
            for member in gl.static_range(1, GROUPS):
                _load(Q, q_tiles, q_full, member, batch, head, first + member * GROUP_ROWS)
        _until_free(NAMED + STAGES, stage, step, GROUPS, STAGES)
        _load(V, v_tiles, v_full, stage, batch, kv_head, key)


@gluon.jit
def _compute_tile(
    OUT, LSE, q_tiles, k_tiles, v_tiles, q_full, k_full, v_full, scale_log2, n, m, heads, all_heads,
    member: gl.constexpr, GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, HEADS_AT_ONCE: gl.constexpr,
):  # fmt: skip
    """Compute 64 query rows of the program's tile, from the first score to the stored output (one group)."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    rows = member * GROUP_ROWS + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, s_layout))
    first, batch, head = _position(gl.program_id(0), n, heads, all_heads, GROUPS, HEADS_AT_ONCE, False)
    tiles, whole = _tile_numbers(first, n, m, GROUPS, BLOCK_N, CAUSAL)
    mbarrier.wait(q_full.index(member), 0)
    mbarrier.wait(k_full.index(0), 0)
    scores = _scores(q_tiles, k_tiles, member, 0, s_layout, BLOCK_N, BLOCK_D)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    _free(None, NAMED, 0, GROUPS, False)
    p, row_max, row_sum, shrink = _first_step(
        scores, first + rows, tiles, n, m, scale_log2, s_layout, BLOCK_N, CAUSAL, v_tiles.dtype
    )
    acc, p, shrink, row_max, row_sum = _all_steps(
        p, shrink, row_max, row_sum, q_tiles, k_tiles, v_tiles, k_full, None, v_full, None,
        whole, tiles, 0, member, first + rows, n, m, scale_log2, s_layout, o_layout, p_layout,
        GROUPS, BLOCK_N, BLOCK_D, STAGES, CAUSAL, False,
    )  # fmt: skip
    acc, probabilities = _added(acc, p, shrink, v_tiles, (tiles - 1) % STAGES, p_layout, BLOCK_N, BLOCK_D)
    acc, probabilities = warpgroup_mma_wait(0, deps=(acc, probabilities))
    # The output reuses the buffer of the queries, which are no longer read.
    _finish(
        OUT, LSE, q_tiles, acc, row_max, row_sum, first, batch, head, heads, n, member, s_layout, False,
        BLOCK_D
    )  # fmt: skip
    tma.store_wait(0)


@gluon.jit
def _barriers(number: gl.constexpr, count: gl.constexpr):
    """Allocate ``number`` mbarriers that complete after ``count`` arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(barriers.index(i), count=count)
    return barriers


@gluon.jit
def forward_gluon_kernel(
    Q, K, V, OUT, LSE, scale_log2, n, m, heads, all_heads, group, shift,
    GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, HEADS_AT_ONCE: gl.constexpr, PERSISTENT: gl.constexpr,
):  # fmt: skip
    """Compute tiles of GROUPS x 64 query rows of one head: one per program, or many with PERSISTENT."""
    gl.static_assert(GROUPS == 2 or (GROUPS == 3 and not PERSISTENT))
    k_tiles = gl.allocate_shared_memory(K.dtype, [STAGES] + K.block_type.shape, K.layout)
    v_tiles = gl.allocate_shared_memory(V.dtype, [STAGES] + V.block_type.shape, V.layout)
    k_full, v_full = _barriers(STAGES, 1), _barriers(STAGES, 1)
    # Triton 3.6 loses which elements are constants when a tuple is assembled from others.
    if PERSISTENT:
        q_tiles = gl.allocate_shared_memory(Q.dtype, [4] + Q.block_type.shape, Q.layout)
        o_tiles = gl.allocate_shared_memory(Q.dtype, [2] + Q.block_type.shape, Q.layout)
        q_full, q_empty = _barriers(4, 1), _barriers(4, 1)
        k_empty, v_empty = _barriers(STAGES, 2), _barriers(STAGES, 2)
        fence_async_shared()
        _barrier()
        gl.warp_specialize(
            [
                (_compute_tiles, (OUT, LSE, q_tiles, o_tiles, k_tiles, v_tiles, q_full, q_empty, k_full,
                                  k_empty, v_full, v_empty, scale_log2, n, m, heads, all_heads, shift, 0,
                                  BLOCK_N, BLOCK_D, STAGES, CAUSAL, HEADS_AT_ONCE)),
                (_compute_tiles, (OUT, LSE, q_tiles, o_tiles, k_tiles, v_tiles, q_full, q_empty, k_full,
                                  k_empty, v_full, v_empty, scale_log2, n, m, heads, all_heads, shift, 1,
                                  BLOCK_N, BLOCK_D, STAGES, CAUSAL, HEADS_AT_ONCE)),
                (_load_tiles, (Q, K, V, q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full,
                               v_empty, n, m, heads, all_heads, group, shift, BLOCK_N, STAGES, CAUSAL,
                               HEADS_AT_ONCE)),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip
    elif GROUPS == 2:
        gl.static_assert(NAMED + 2 * STAGES <= 16)
        q_tiles = gl.allocate_shared_memory(Q.dtype, [2] + Q.block_type.shape, Q.layout)
        q_full = _barriers(2, 1)
        fence_async_shared()
        _barrier()
        gl.warp_specialize(
            [
                (_compute_tile, (OUT, LSE, q_tiles, k_tiles, v_tiles, q_full, k_full, v_full, scale_log2, n,
                                 m, heads, all_heads, 0, GROUPS, BLOCK_N, BLOCK_D, STAGES, CAUSAL,
                                 HEADS_AT_ONCE)),
                (_compute_tile, (OUT, LSE, q_tiles, k_tiles, v_tiles, q_full, k_full, v_full, scale_log2, n,
                                 m, heads, all_heads, 1, GROUPS, BLOCK_N, BLOCK_D, STAGES, CAUSAL,
                                 HEADS_AT_ONCE)),
                (_load_tile, (Q, K, V, q_tiles, k_tiles, v_tiles, q_full, k_full, v_full, n, m, heads,
                              all_heads, group, GROUPS, BLOCK_N, STAGES, CAUSAL, HEADS_AT_ONCE)),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip
    else:
        gl.static_assert(NAMED + 2 * STAGES <= 16)
        q_tiles = gl.allocate_shared_memory(Q.dtype, [3] + Q.block_type.shape, Q.layout)
        q_full = _barriers(3, 1)
        fence_async_shared()
        _barrier()
        gl.warp_specialize(
            [
                (_compute_tile, (OUT, LSE, q_tiles, k_tiles, v_tiles, q_full, k_full, v_full, scale_log2, n,
                                 m, heads, all_heads, 0, GROUPS, BLOCK_N, BLOCK_D, STAGES, CAUSAL,
                                 HEADS_AT_ONCE)),
                (_compute_tile, (OUT, LSE, q_tiles, k_tiles, v_tiles, q_full, k_full, v_full, scale_log2, n,
                                 m, heads, all_heads, 1, GROUPS, BLOCK_N, BLOCK_D, STAGES, CAUSAL,
                                 HEADS_AT_ONCE)),
                (_compute_tile, (OUT, LSE, q_tiles, k_tiles, v_tiles, q_full, k_full, v_full, scale_log2, n,
                                 m, heads, all_heads, 2, GROUPS, BLOCK_N, BLOCK_D, STAGES, CAUSAL,
                                 HEADS_AT_ONCE)),
                (_load_tile, (Q, K, V, q_tiles, k_tiles, v_tiles, q_full, k_full, v_full, n, m, heads,
                              all_heads, group, GROUPS, BLOCK_N, STAGES, CAUSAL, HEADS_AT_ONCE)),
            ],
            [4, 4, 1], [160, 160, 32],
        )  # fmt: skip
