# Gluon's compiler reads these functions, and it knows neither starred lists nor Python's types.
# ruff: noqa: SIM102
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false
"""The steps of FlashAttention's forward on Hopper in Gluon: where a tile is, its products, softmax after softmax, its results.

Keys are walked from the last to the first, so the masked tiles come first; a program without any key (causal, n > m) still
takes one tile, all of it masked. Two groups take many tiles (flash_attention_persistent_gluon.py) and free a place of keys
or values at a barrier in memory; three take one (flash_attention_gluon.py) and free it at a named barrier.
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

from trainfit.kernels.flash_attention.hopper.barriers import GROUP_THREADS, _arrive_at, _barrier, _release
from trainfit.kernels.flash_attention.hopper.softmax import (
    GROUP_ROWS,
    THREADS_OF_ROW,
    _operand,
    _packed,
    _probabilities,
    _shrunk,
)

LN_2 = gl.constexpr(0.6931471805599453)
NAMED = gl.constexpr(5)
"""The first named barrier that Triton leaves alone, with three groups (CUDA has 16)."""


@gluon.jit
def _place(number, n, heads, all_heads, GROUPS: gl.constexpr, HEADS_AT_ONCE: gl.constexpr):
    """First row, batch and head of a tile: a few heads at a time, their longest rows (the last) first.

    Of two groups' tiles: of the last heads; of those before the shortest first, and so on, so that turns with neighbours are
    of equal length. ``lengths`` in flash_attention_schedule.py does the same sum.
    """
    BLOCK_M: gl.constexpr = GROUPS * GROUP_ROWS
    blocks = gl.cdiv(n, BLOCK_M)
    group = number // (HEADS_AT_ONCE * blocks)
    first_head = group * HEADS_AT_ONCE
    here = gl.minimum(HEADS_AT_ONCE, all_heads - first_head)
    place = number - first_head * blocks
    if GROUPS == 2:
        if (gl.cdiv(all_heads, HEADS_AT_ONCE) - group) % 2 == 0:
            place = here * blocks - 1 - place
    batch_head = first_head + place % here
    return (blocks - 1 - place // here) * BLOCK_M, batch_head // heads, batch_head % heads


@gluon.jit
def _tile_numbers(first, n, m, GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """How many key tiles these rows need, and how many of them every row sees whole."""
    stop, whole = m, m
    if CAUSAL:
        stop = gl.minimum(m, gl.maximum(0, first + GROUPS * GROUP_ROWS + (m - n)))
        whole = gl.minimum(m, gl.maximum(0, first + (m - n) + 1))
    tiles = gl.maximum(1, gl.cdiv(stop, BLOCK_N))
    return tiles, gl.minimum(tiles - 1, whole // BLOCK_N)


@gluon.jit
def _load(X, tiles, full, place, batch, head, row):
    """A tile of q, keys or values on its way to its place; ``full`` tells when it is there."""
    mbarrier.expect(full.index(place), X.block_type.nbytes)
    tma.async_copy_global_to_shared(X, [batch, head, row, 0], full.index(place), tiles.index(place))


@gluon.jit
def _free(empty, barrier, slot, GROUPS: gl.constexpr):
    """This group is through with a place of the keys or values: tells ``empty`` or the named barriers from ``barrier`` on."""
    if GROUPS == 2:
        _release(empty.index(slot))
    else:
        _arrive_at(barrier + slot, GROUPS * GROUP_THREADS + 32)


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
def _added(
    acc, p, shrink, v_tiles, slot, p_layout: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr
):
    """Probabilities times values added to earlier results, on its way; and the probabilities, which it reads until then."""
    acc = _shrunk(acc, shrink)  # under the scores' product just begun
    probabilities = _operand(p, v_tiles.dtype, p_layout)
    values = v_tiles.index(slot).reshape([BLOCK_N, BLOCK_D])
    return warpgroup_mma(probabilities, values, acc, is_async=True), probabilities


@gluon.jit
def _first_step(
    scores, rows, tiles, n, m, scale_log2, s_layout: gl.constexpr,
    BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """The probabilities of a tile's last keys, which come first."""
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    row_max = gl.full([GROUP_ROWS], float("-inf"), gl.float32, row_layout)
    row_sum = gl.zeros([GROUP_ROWS, 4], gl.float32, THREADS_OF_ROW)  # one for each thread of a row
    p, row_max, row_sum, shrink = _probabilities(
        scores, row_max, row_sum, rows, (tiles - 1) * BLOCK_N, n, m, scale_log2,
        gl.SliceLayout(0, s_layout), BLOCK_N, True, CAUSAL,
    )  # fmt: skip
    return _packed(p, DTYPE), row_max, row_sum, shrink


@gluon.jit
def _steps(
    acc, p, shrink, row_max, row_sum, q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
    start, stop, tiles, done, place, rows, n, m, scale_log2, s_layout: gl.constexpr, p_layout: gl.constexpr,
    GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Steps ``start`` to ``stop``: scores of this step's keys beside the last step's probabilities times values.

    ``done`` tiles of keys were loaded for tiles of queries before this one, whose queries stand at ``place``.
    """
    for step in range(start, stop):
        slot, phase = (done + step) % STAGES, ((done + step) // STAGES) & 1
        old_slot = (done + step - 1) % STAGES
        mbarrier.wait(k_full.index(slot), phase)
        scores = _scores(q_tiles, k_tiles, place, slot, s_layout, BLOCK_N, BLOCK_D)
        acc, probabilities = _added(acc, p, shrink, v_tiles, old_slot, p_layout, BLOCK_N, BLOCK_D)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        _free(k_empty, NAMED, slot, GROUPS)
        new_p, row_max, row_sum, shrink = _probabilities(
            scores, row_max, row_sum, rows, (tiles - 1 - step) * BLOCK_N, n, m, scale_log2,
            gl.SliceLayout(0, s_layout), BLOCK_N, MASKED, CAUSAL,
        )  # fmt: skip
        # This step's values, wanted next: the loop in this wait keeps ptxas from waiting for the product above before the softmax.
        mbarrier.wait(v_full.index(slot), phase)
        acc, probabilities = warpgroup_mma_wait(0, deps=(acc, probabilities))
        _free(v_empty, NAMED + STAGES, old_slot, GROUPS)
        p = _packed(new_p, v_tiles.dtype)
    return acc, p, shrink, row_max, row_sum


@gluon.jit
def _all_steps(
    p, shrink, row_max, row_sum, q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
    whole, tiles, done, place, rows, n, m, scale_log2, s_layout: gl.constexpr, o_layout: gl.constexpr,
    p_layout: gl.constexpr, GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """All but a tile's first: those with a mask, then those that every row sees whole. The last values are left to add."""
    acc = gl.zeros([GROUP_ROWS, BLOCK_D], gl.float32, o_layout)
    mbarrier.wait(v_full.index(done % STAGES), (done // STAGES) & 1)
    acc, p, shrink, row_max, row_sum = _steps(
        acc, p, shrink, row_max, row_sum, q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
        1, tiles - whole, tiles, done, place, rows, n, m, scale_log2, s_layout, p_layout,
        GROUPS, BLOCK_N, BLOCK_D, STAGES, CAUSAL, True,
    )  # fmt: skip
    return _steps(
        acc, p, shrink, row_max, row_sum, q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
        tiles - whole, tiles, tiles, done, place, rows, n, m, scale_log2, s_layout, p_layout,
        GROUPS, BLOCK_N, BLOCK_D, STAGES, CAUSAL, False,
    )  # fmt: skip


@gluon.jit
def _finish(
    OUT, LSE, o_tiles, acc, row_max, row_sum, first, batch, head, heads, n, member: gl.constexpr,
    s_layout: gl.constexpr, GROUPS: gl.constexpr, BLOCK_D: gl.constexpr,
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
    if GROUPS == 2:  # the tile before may still be on its way from there
        tma.store_wait(0)
        _barrier()
    o_tiles.index(member).reshape([GROUP_ROWS, BLOCK_D]).store(out.to(o_tiles.dtype))
    fence_async_shared()
    _barrier()
    tma.async_copy_shared_to_global(OUT, [batch, head, first + member * GROUP_ROWS, 0], o_tiles.index(member))
