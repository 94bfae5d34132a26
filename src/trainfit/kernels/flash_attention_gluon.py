# Gluon's compiler reads these functions, and it knows neither starred lists nor Python's types.
# ruff: noqa: RUF005, SIM102
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false
"""FlashAttention's forward for Hopper in Gluon: one warp loads by TMA, two or three groups of four warps compute.

Each group owns 64 query rows. While the tensor cores multiply the probabilities of the last keys by their values, the group
computes the softmax of the next (Shah et al. 2024, FlashAttention-3, arXiv:2407.08608, section 3.2). Earlier results shrink
under the next scores' product; maxima are taken in four chains, and a row's four threads add up their sums only at the end.
``PERSISTENT``: as many programs as the GPU has multiprocessors, each with a list of tiles; the loading warp is already at the
next tile when the groups end one, and with ``AHEAD`` the groups compute the next tile's first scores before.

Descriptors as flash_attention_tma.py makes them. Keys are walked from the last to the first, so the masked tiles come first;
a program without any key (causal, n > m) still takes one tile, all of it masked.
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

from trainfit.kernels.flash_attention_softmax_gluon import (
    GROUP_ROWS,
    THREADS_OF_ROW,
    _operand,
    _packed,
    _probabilities,
    _shrunk,
)
from trainfit.kernels.named_barriers_gluon import GROUP_THREADS, _arrive_at, _barrier, _release, _wait_for

LN_2 = gl.constexpr(0.6931471805599453)
NAMED = gl.constexpr(5)
"""The first named barrier that Triton leaves alone, with three groups (CUDA has 16)."""


@gluon.jit
def _free(empty, barrier, slot, really, GROUPS: gl.constexpr, ARRIVE: gl.constexpr):
    """This group is through with a place of the keys or values: tells ``empty`` or the named barriers from ``barrier`` on."""
    if ARRIVE:
        _arrive_at(barrier + slot, GROUPS * GROUP_THREADS + 32, really)
    else:
        _release(empty.index(slot))


@gluon.jit
def _until_free(
    empty, barrier, slot, number, GROUPS: gl.constexpr, STAGES: gl.constexpr, ARRIVE: gl.constexpr
):
    """The loading warp waits until all groups are through with what was in this place before load ``number``."""
    if ARRIVE:
        if number >= STAGES:
            _wait_for(barrier + slot, GROUPS * GROUP_THREADS + 32, 1)
    else:
        mbarrier.wait(empty.index(slot), ((number // STAGES) & 1) ^ 1)


@gluon.jit
def _count(n, all_heads, shift, BLOCK_M: gl.constexpr, PERSISTENT: gl.constexpr):
    """How many tiles of queries this program takes."""
    if PERSISTENT:
        tiles, programs = gl.cdiv(n, BLOCK_M) * all_heads, gl.num_programs(0)
        turns = tiles // programs
        return turns + ((gl.program_id(0) + turns * shift) % programs < tiles - turns * programs).to(gl.int32)
    else:
        return 1


@gluon.jit
def _number(turn, shift, PERSISTENT: gl.constexpr):
    """This program's tile ``turn``: every turn takes the next tiles, one a program, ``shift`` programs further each time."""
    if PERSISTENT:
        programs = gl.num_programs(0)
        return turn * programs + (gl.program_id(0) + turn * shift) % programs
    else:
        return gl.program_id(0)


@gluon.jit
def _place(
    number, n, heads, all_heads, BLOCK_M: gl.constexpr, HEADS_AT_ONCE: gl.constexpr, PERSISTENT: gl.constexpr
):
    """First row, batch and head of a tile: a few heads at a time, their longest rows (the last) first.

    PERSISTENT: of the last heads; of those before the shortest first, and so on, so that turns with neighbours are of equal
    length. ``shares`` in flash_attention_schedule.py does the same sum.
    """
    blocks = gl.cdiv(n, BLOCK_M)
    group = number // (HEADS_AT_ONCE * blocks)
    first_head = group * HEADS_AT_ONCE
    here = gl.minimum(HEADS_AT_ONCE, all_heads - first_head)
    place = number - first_head * blocks
    if PERSISTENT:
        if (gl.cdiv(all_heads, HEADS_AT_ONCE) - group) % 2 == 0:
            place = here * blocks - 1 - place
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
def _query_place(turn, member: gl.constexpr, GROUPS: gl.constexpr, AHEAD: gl.constexpr):
    """Where a group's queries of its tile ``turn`` stand, and the phase of their barriers: with AHEAD two places a group."""
    if AHEAD:
        return (turn & 1) * GROUPS + member, (turn >> 1) & 1
    else:
        return member, turn & 1


@gluon.jit
def _load_query(
    Q, q_tiles, q_full, q_empty, turn, batch, head, row,
    member: gl.constexpr, GROUPS: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    place, phase = _query_place(turn, member, GROUPS, AHEAD)
    mbarrier.wait(q_empty.index(place), phase ^ 1)
    mbarrier.expect(q_full.index(place), Q.block_type.nbytes)
    tma.async_copy_global_to_shared(
        Q, [batch, head, row + member * GROUP_ROWS, 0], q_full.index(place), q_tiles.index(place)
    )


@gluon.jit
def _load_tiles(
    Q, K, V, q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    n, m, heads, all_heads, group, shift,
    GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    HEADS_AT_ONCE: gl.constexpr, PERSISTENT: gl.constexpr, ARRIVE: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """The loading warp: each group's q, keys and values, as the groups free their places."""
    BLOCK_M: gl.constexpr = GROUPS * GROUP_ROWS
    done = 0
    for turn in range(_count(n, all_heads, shift, BLOCK_M, PERSISTENT)):
        first, batch, head = _place(
            _number(turn, shift, PERSISTENT), n, heads, all_heads, BLOCK_M, HEADS_AT_ONCE, PERSISTENT
        )
        tiles, _ = _tile_numbers(first, n, m, BLOCK_M, BLOCK_N, CAUSAL)
        kv_head = head // group
        _load_query(Q, q_tiles, q_full, q_empty, turn, batch, head, first, 0, GROUPS, AHEAD)
        for step in range(tiles):
            key = (tiles - 1 - step) * BLOCK_N
            slot = (done + step) % STAGES
            _until_free(k_empty, NAMED, slot, done + step, GROUPS, STAGES, ARRIVE)
            mbarrier.expect(k_full.index(slot), K.block_type.nbytes)
            tma.async_copy_global_to_shared(
                K, [batch, kv_head, key, 0], k_full.index(slot), k_tiles.index(slot)
            )
            if step == 0:  # the first group may begin before the others' queries have come
                for member in gl.static_range(1, GROUPS):
                    _load_query(Q, q_tiles, q_full, q_empty, turn, batch, head, first, member, GROUPS, AHEAD)
            _until_free(v_empty, NAMED + STAGES, slot, done + step, GROUPS, STAGES, ARRIVE)
            mbarrier.expect(v_full.index(slot), V.block_type.nbytes)
            tma.async_copy_global_to_shared(
                V, [batch, kv_head, key, 0], v_full.index(slot), v_tiles.index(slot)
            )
        done += tiles


@gluon.jit
def _scores(
    q_tiles, k_tiles, place, slot, s_layout: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr
):
    """Q K^T of a group's queries and a tile of keys, on its way."""
    q = q_tiles.index(place).reshape([GROUP_ROWS, BLOCK_D])
    k = k_tiles.index(slot).reshape([BLOCK_N, BLOCK_D]).permute((1, 0))
    zeros = gl.zeros([GROUP_ROWS, BLOCK_N], gl.float32, s_layout)
    return warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)


@gluon.jit
def _steps(
    acc, p, shrink, row_max, row_sum, q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
    start, stop, tiles, done, turn, rows, n, m, scale_log2,
    member: gl.constexpr, s_layout: gl.constexpr, o_layout: gl.constexpr, p_layout: gl.constexpr,
    GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, LAZY: gl.constexpr, ARRIVE: gl.constexpr, AHEAD: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Steps ``start`` to ``stop``: scores of this step's keys beside the last step's probabilities times values."""
    place, _ = _query_place(turn, member, GROUPS, AHEAD)
    for step in range(start, stop):
        slot, phase = (done + step) % STAGES, ((done + step) // STAGES) & 1
        old_slot = (done + step - 1) % STAGES
        mbarrier.wait(k_full.index(slot), phase)
        scores = _scores(q_tiles, k_tiles, place, slot, s_layout, BLOCK_N, BLOCK_D)
        acc = _shrunk(acc, shrink, LAZY)  # under the product just begun
        probabilities = _operand(p, v_tiles.dtype, p_layout)
        acc = warpgroup_mma(
            probabilities, v_tiles.index(old_slot).reshape([BLOCK_N, BLOCK_D]), acc, is_async=True
        )
        scores = warpgroup_mma_wait(1, deps=(scores,))
        _free(k_empty, NAMED, slot, 1, GROUPS, ARRIVE)
        new_p, row_max, row_sum, shrink = _probabilities(
            scores, row_max, row_sum, rows, (tiles - 1 - step) * BLOCK_N, n, m, scale_log2,
            gl.SliceLayout(0, s_layout), BLOCK_N, MASKED, CAUSAL, LAZY,
        )  # fmt: skip
        # This step's values, wanted next: the loop in this wait keeps ptxas from waiting for the product above before the softmax.
        mbarrier.wait(v_full.index(slot), phase)
        acc, probabilities = warpgroup_mma_wait(
            0, deps=(acc, probabilities)
        )  # their registers were read until here
        _free(v_empty, NAMED + STAGES, old_slot, 1, GROUPS, ARRIVE)
        p = _packed(new_p, v_tiles.dtype)
    return acc, p, shrink, row_max, row_sum


@gluon.jit
def _first_step(
    scores, rows, tiles, n, m, scale_log2, s_layout: gl.constexpr,
    BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr, LAZY: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """The probabilities of a tile's last keys, which come first."""
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    row_max = gl.full([GROUP_ROWS], float("-inf"), gl.float32, row_layout)
    row_sum = gl.zeros([GROUP_ROWS, 4], gl.float32, THREADS_OF_ROW)  # one for each thread of a row
    p, row_max, row_sum, shrink = _probabilities(
        scores, row_max, row_sum, rows, (tiles - 1) * BLOCK_N, n, m, scale_log2,
        gl.SliceLayout(0, s_layout), BLOCK_N, True, CAUSAL, LAZY,
    )  # fmt: skip
    return _packed(p, DTYPE), row_max, row_sum, shrink


@gluon.jit
def _finish(
    OUT, LSE, o_tiles, acc, row_max, row_sum, first, batch, head, heads, n, member: gl.constexpr,
    s_layout: gl.constexpr, BLOCK_D: gl.constexpr, PERSISTENT: gl.constexpr,
):  # fmt: skip
    """Log-sum-exp and output of a group's 64 rows on their way to memory."""
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    row_sum = gl.convert_layout(gl.sum(row_sum, 1), row_layout)
    none = row_sum == 0.0
    total = gl.where(none, 1.0, row_sum)
    lse = gl.where(none, float("-inf"), (row_max + gl.log2(total)) * LN_2)
    rows = first + member * GROUP_ROWS + gl.arange(0, GROUP_ROWS, row_layout)
    at = (batch * heads + head).to(gl.int64) * n + rows
    gl.store(LSE + at, lse, mask=rows < n)
    out = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, acc.type.layout))[:, None]
    if PERSISTENT:
        tma.store_wait(0)
        _barrier()
    o_tiles.index(member).reshape([GROUP_ROWS, BLOCK_D]).store(out.to(o_tiles.dtype))
    fence_async_shared()
    _barrier()
    tma.async_copy_shared_to_global(OUT, [batch, head, first + member * GROUP_ROWS, 0], o_tiles.index(member))


@gluon.jit
def _compute(
    OUT, LSE, q_tiles, o_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    scale_log2, n, m, heads, all_heads, shift, member: gl.constexpr,
    GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, HEADS_AT_ONCE: gl.constexpr, PERSISTENT: gl.constexpr, LAZY: gl.constexpr, ARRIVE: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """One group: 64 query rows of each of the program's tiles, from the first score to the stored output."""
    BLOCK_M: gl.constexpr = GROUPS * GROUP_ROWS
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    lanes = member * GROUP_ROWS + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, s_layout))
    count = _count(n, all_heads, shift, BLOCK_M, PERSISTENT)
    if AHEAD:
        first, batch, head = _place(
            _number(0, shift, PERSISTENT), n, heads, all_heads, BLOCK_M, HEADS_AT_ONCE, PERSISTENT
        )
        tiles, _ = _tile_numbers(first, n, m, BLOCK_M, BLOCK_N, CAUSAL)
        mbarrier.wait(q_full.index(member), 0)
        mbarrier.wait(k_full.index(0), 0)
        scores = _scores(q_tiles, k_tiles, member, 0, s_layout, BLOCK_N, BLOCK_D)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        _free(k_empty, NAMED, 0, 1, GROUPS, ARRIVE)
        p, row_max, row_sum, shrink = _first_step(
            scores, first + lanes, tiles, n, m, scale_log2, s_layout, BLOCK_N, CAUSAL, LAZY, v_tiles.dtype
        )  # fmt: skip
    done = 0
    for turn in range(count):
        place, phase_of_query = _query_place(turn, member, GROUPS, AHEAD)
        slot, phase = done % STAGES, (done // STAGES) & 1
        if not AHEAD:
            first, batch, head = _place(
                _number(turn, shift, PERSISTENT), n, heads, all_heads, BLOCK_M, HEADS_AT_ONCE, PERSISTENT
            )
        # Also with AHEAD, which knew them before: of the two that the loop then carried, Triton 3.6's inliner left ``whole`` as it
        # was for the first tile, and the groups waited for keys that nobody loads.
        tiles, whole = _tile_numbers(first, n, m, BLOCK_M, BLOCK_N, CAUSAL)
        if not AHEAD:
            mbarrier.wait(q_full.index(place), phase_of_query)
            mbarrier.wait(k_full.index(slot), phase)
            scores = _scores(q_tiles, k_tiles, place, slot, s_layout, BLOCK_N, BLOCK_D)
            scores = warpgroup_mma_wait(0, deps=(scores,))
            _free(k_empty, NAMED, slot, 1, GROUPS, ARRIVE)
            p, row_max, row_sum, shrink = _first_step(
                scores, first + lanes, tiles, n, m, scale_log2, s_layout, BLOCK_N, CAUSAL, LAZY,
                v_tiles.dtype,
            )  # fmt: skip
        rows = first + lanes
        acc = gl.zeros([GROUP_ROWS, BLOCK_D], gl.float32, o_layout)
        mbarrier.wait(v_full.index(slot), phase)
        acc, p, shrink, row_max, row_sum = _steps(
            acc, p, shrink, row_max, row_sum, q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
            1, tiles - whole, tiles, done, turn, rows, n, m, scale_log2, member, s_layout, o_layout, p_layout, GROUPS,
            BLOCK_N, BLOCK_D, STAGES, CAUSAL, LAZY, ARRIVE, AHEAD, True,
        )  # fmt: skip
        acc, p, shrink, row_max, row_sum = _steps(
            acc, p, shrink, row_max, row_sum, q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
            tiles - whole, tiles, tiles, done, turn, rows, n, m, scale_log2, member, s_layout, o_layout, p_layout, GROUPS,
            BLOCK_N, BLOCK_D, STAGES, CAUSAL, LAZY, ARRIVE, AHEAD, False,
        )  # fmt: skip
        if PERSISTENT:
            _release(q_empty.index(place))
        last = (done + tiles - 1) % STAGES
        done += tiles
        if AHEAD:  # behind the last tile once more, with what is left in the places
            goes = (turn + 1 < count).to(gl.int32)
            next_first, next_batch, next_head = _place(
                _number(turn + goes, shift, PERSISTENT),
                n,
                heads,
                all_heads,
                BLOCK_M,
                HEADS_AT_ONCE,
                PERSISTENT,
            )
            next_tiles, _ = _tile_numbers(next_first, n, m, BLOCK_M, BLOCK_N, CAUSAL)
            next_place, next_phase = _query_place(turn + 1, member, GROUPS, AHEAD)
            mbarrier.wait(q_full.index(next_place), next_phase, pred=goes > 0)
            mbarrier.wait(k_full.index(done % STAGES), (done // STAGES) & 1, pred=goes > 0)
            scores = _scores(q_tiles, k_tiles, next_place, done % STAGES, s_layout, BLOCK_N, BLOCK_D)
        acc = _shrunk(acc, shrink, LAZY)
        probabilities = _operand(p, v_tiles.dtype, p_layout)
        acc = warpgroup_mma(
            probabilities, v_tiles.index(last).reshape([BLOCK_N, BLOCK_D]), acc, is_async=True
        )
        if AHEAD:
            scores = warpgroup_mma_wait(1, deps=(scores,))
            _free(k_empty, NAMED, done % STAGES, goes, GROUPS, ARRIVE)
            p, next_max, next_sum, shrink = _first_step(
                scores, next_first + lanes, next_tiles, n, m, scale_log2, s_layout, BLOCK_N, CAUSAL, LAZY,
                v_tiles.dtype,
            )  # fmt: skip
        acc, probabilities = warpgroup_mma_wait(0, deps=(acc, probabilities))
        if PERSISTENT:
            _free(v_empty, NAMED + STAGES, last, 1, GROUPS, ARRIVE)
        _finish(
            OUT, LSE, o_tiles, acc, row_max, row_sum, first, batch, head, heads, n, member, s_layout, BLOCK_D,
            PERSISTENT,
        )  # fmt: skip
        if AHEAD:
            first, batch, head = next_first, next_batch, next_head
            row_max, row_sum = next_max, next_sum
    tma.store_wait(0)


@gluon.jit
def forward_gluon_kernel(
    Q, K, V, OUT, LSE, scale_log2, n, m, heads, all_heads, group, shift,
    GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, HEADS_AT_ONCE: gl.constexpr, PERSISTENT: gl.constexpr, LAZY: gl.constexpr, ARRIVE: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """A program takes GROUPS x 64 query rows of one head or, ``PERSISTENT``, many such tiles one after the other."""
    gl.static_assert(PERSISTENT or not AHEAD)
    gl.static_assert(not ARRIVE or NAMED + 2 * STAGES <= 16)
    queries: gl.constexpr = 2 * GROUPS if AHEAD else GROUPS
    q_tiles = gl.allocate_shared_memory(Q.dtype, [queries] + Q.block_type.shape, Q.layout)
    o_tiles = q_tiles  # the queries are read when the output comes, and only then does it need their place
    if PERSISTENT:
        o_tiles = gl.allocate_shared_memory(Q.dtype, [GROUPS] + Q.block_type.shape, Q.layout)
    k_tiles = gl.allocate_shared_memory(K.dtype, [STAGES] + K.block_type.shape, K.layout)
    v_tiles = gl.allocate_shared_memory(V.dtype, [STAGES] + V.block_type.shape, V.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [queries, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [queries, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(k_full.index(slot), count=1)
        mbarrier.init(v_full.index(slot), count=1)
        mbarrier.init(k_empty.index(slot), count=GROUPS)
        mbarrier.init(v_empty.index(slot), count=GROUPS)
    for place in gl.static_range(queries):
        mbarrier.init(q_full.index(place), count=1)
        mbarrier.init(q_empty.index(place), count=1)
    fence_async_shared()
    _barrier()
    # Whole tuples: in Triton 3.6 one that is put together from others loses which of its parts are constants.
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_compute, (OUT, LSE, q_tiles, o_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty,
                            v_full, v_empty, scale_log2, n, m, heads, all_heads, shift, 0, GROUPS, BLOCK_N,
                            BLOCK_D, STAGES, CAUSAL, HEADS_AT_ONCE, PERSISTENT, LAZY, ARRIVE, AHEAD)),
                (_compute, (OUT, LSE, q_tiles, o_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty,
                            v_full, v_empty, scale_log2, n, m, heads, all_heads, shift, 1, GROUPS, BLOCK_N,
                            BLOCK_D, STAGES, CAUSAL, HEADS_AT_ONCE, PERSISTENT, LAZY, ARRIVE, AHEAD)),
                (_load_tiles, (Q, K, V, q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty,
                               v_full, v_empty, n, m, heads, all_heads, group, shift, GROUPS, BLOCK_N, STAGES,
                               CAUSAL, HEADS_AT_ONCE, PERSISTENT, ARRIVE, AHEAD)),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip
    else:
        gl.static_assert(GROUPS == 3)
        gl.warp_specialize(
            [
                (_compute, (OUT, LSE, q_tiles, o_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty,
                            v_full, v_empty, scale_log2, n, m, heads, all_heads, shift, 0, GROUPS, BLOCK_N,
                            BLOCK_D, STAGES, CAUSAL, HEADS_AT_ONCE, PERSISTENT, LAZY, ARRIVE, AHEAD)),
                (_compute, (OUT, LSE, q_tiles, o_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty,
                            v_full, v_empty, scale_log2, n, m, heads, all_heads, shift, 1, GROUPS, BLOCK_N,
                            BLOCK_D, STAGES, CAUSAL, HEADS_AT_ONCE, PERSISTENT, LAZY, ARRIVE, AHEAD)),
                (_compute, (OUT, LSE, q_tiles, o_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty,
                            v_full, v_empty, scale_log2, n, m, heads, all_heads, shift, 2, GROUPS, BLOCK_N,
                            BLOCK_D, STAGES, CAUSAL, HEADS_AT_ONCE, PERSISTENT, LAZY, ARRIVE, AHEAD)),
                (_load_tiles, (Q, K, V, q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty,
                               v_full, v_empty, n, m, heads, all_heads, group, shift, GROUPS, BLOCK_N, STAGES,
                               CAUSAL, HEADS_AT_ONCE, PERSISTENT, ARRIVE, AHEAD)),
            ],
            [4, 4, 1], [160, 160, 32],
        )  # fmt: skip
