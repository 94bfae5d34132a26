# Gluon's compiler reads these functions, and it knows neither starred lists nor Python's types.
# ruff: noqa: RUF005
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false
"""FlashAttention's backward for Hopper in Gluon: one warp loads by TMA, two groups of four warps compute.

A program owns 128 keys and values, a group 64 of them. Scores are transposed [keys, queries], so P and dS are the register
operand of the products for dV and dK. dS also goes to shared memory, where each group takes both groups' part of it for its
half of dQ (columns, or with 128 query rows a tile, rows); TMA adds that in fp32 to memory (Shah et al. 2024,
FlashAttention-3, arXiv:2407.08608, section 3 and appendix B). The sums come in another order each time.

Descriptors and ``prepare_tma_kernel``'s results as in flash_attention_tma_triton.py; BLOCK_D is 64 or 128.
"""

from __future__ import annotations

from typing import Any

from triton._C.libtriton import ir  # the reduction that Gluon does not name
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from trainfit.kernels.flash_attention_gluon import _barrier, _release

GROUP_KEYS = gl.constexpr(64)
GROUPS = gl.constexpr(2)
HALF = gl.constexpr(64)
"""Rows and columns of a group's part of dQ."""


@builtin
def _add_to_memory(descriptor, place, tile, _semantic: Any = None):
    """TMA's reduction: ``tile`` added to what is there."""
    place = _semantic._convert_to_ir_values(place, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, place, tile.handle
    )


@gluon.jit
def _place(m, kv_heads, all_kv_heads, HEADS_AT_ONCE: gl.constexpr):
    """First key, batch and key-value head: a few heads at a time; the first keys have the most queries."""
    BLOCK_N: gl.constexpr = GROUPS * GROUP_KEYS
    blocks = gl.cdiv(m, BLOCK_N)
    program = gl.program_id(0)
    first_head = program // (HEADS_AT_ONCE * blocks) * HEADS_AT_ONCE
    here = gl.minimum(HEADS_AT_ONCE, all_kv_heads - first_head)
    place = program - first_head * blocks
    batch_head = first_head + place % here
    return place // here * BLOCK_N, batch_head // kv_heads, batch_head % kv_heads


@gluon.jit
def _row_tiles(key, n, m, BLOCK_M: gl.constexpr, CAUSAL: gl.constexpr):
    """First tile of rows that see these keys, the first that sees all of them, and the number of all tiles."""
    BLOCK_N: gl.constexpr = GROUPS * GROUP_KEYS
    tiles = gl.cdiv(n, BLOCK_M)
    begin, whole = 0, 0
    if CAUSAL:
        begin = gl.minimum(tiles, gl.maximum(0, key - (m - n)) // BLOCK_M)
        whole = gl.minimum(tiles, gl.cdiv(gl.maximum(0, key + BLOCK_N - 1 - (m - n)), BLOCK_M))
    if key + BLOCK_N > m:
        whole = tiles  # keys that do not exist must not reach dQ
    return begin, whole, tiles


@gluon.jit
def _load_tiles(
    Q, K, V, DO, LSE_2, DELTA, q_tiles, k_tiles, v_tiles, do_tiles, lse_tiles, delta_tiles, kv_full, q_full, q_empty, do_full, do_empty,
    n, m, heads, kv_heads, all_kv_heads,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, HEADS_AT_ONCE: gl.constexpr,
):  # fmt: skip
    """The loading warp: keys and values once, then queries and output gradients as the groups free their places."""
    key, batch, kv_head = _place(m, kv_heads, all_kv_heads, HEADS_AT_ONCE)
    begin, _, tiles = _row_tiles(key, n, m, BLOCK_M, CAUSAL)
    mbarrier.expect(kv_full, GROUPS * (K.block_type.nbytes + V.block_type.nbytes))
    for member in gl.static_range(GROUPS):
        at = [batch, kv_head, key + member * GROUP_KEYS, 0]
        tma.async_copy_global_to_shared(K, at, kv_full, k_tiles.index(member))
        tma.async_copy_global_to_shared(V, at, kv_full, v_tiles.index(member))
    group, per_head = heads // kv_heads, tiles - begin
    for step in range(group * per_head):
        at = [batch, kv_head * group + step // per_head, (begin + step % per_head) * BLOCK_M, 0]
        slot, phase = step % STAGES, (step // STAGES) & 1
        mbarrier.wait(q_empty.index(slot), phase ^ 1)
        mbarrier.expect(q_full.index(slot), Q.block_type.nbytes + LSE_2.block_type.nbytes)
        tma.async_copy_global_to_shared(Q, at, q_full.index(slot), q_tiles.index(slot))
        row = [batch * heads + kv_head * group + step // per_head, (begin + step % per_head) * BLOCK_M]
        tma.async_copy_global_to_shared(LSE_2, row, q_full.index(slot), lse_tiles.index(slot))
        mbarrier.wait(do_empty.index(slot), phase ^ 1)
        mbarrier.expect(do_full.index(slot), DO.block_type.nbytes + DELTA.block_type.nbytes)
        tma.async_copy_global_to_shared(DO, at, do_full.index(slot), do_tiles.index(slot))
        tma.async_copy_global_to_shared(DELTA, row, do_full.index(slot), delta_tiles.index(slot))


@gluon.jit
def _query_gradient(ds_tiles, k_tiles, member: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr):
    """This group's half of dS K over both groups' keys, on its way: rows where a tile has 128, else columns."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    dq = gl.zeros([HALF, HALF], gl.float32, layout)
    for part in gl.static_range(GROUPS):
        ds = ds_tiles.index(part)
        k = k_tiles.index(part).reshape([GROUP_KEYS, BLOCK_D])
        if BLOCK_M > HALF:
            ds = ds.slice(member * HALF, HALF, dim=1)
        if BLOCK_D > HALF:
            k = k.slice(member * HALF, HALF, dim=1)
        dq = warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=part > 0, is_async=True)
    return dq


@gluon.jit
def _steps(
    dk, dv, DQ, q_tiles, k_tiles, v_tiles, do_tiles, lse_tiles, delta_tiles, ds_tiles, dq_tiles,
    q_full, q_empty, do_full, do_empty, ds_full, ds_empty, batch, head, first_step, begin, start, stop, key,
    n, m, scale_log2, member: gl.constexpr, s_layout: gl.constexpr, acc_layout: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Tiles of rows ``start`` to ``stop`` folded into the gradients of this group's keys and values."""
    column: gl.constexpr = gl.SliceLayout(0, s_layout)
    operand: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    k = k_tiles.index(member).reshape([GROUP_KEYS, BLOCK_D])
    v = v_tiles.index(member).reshape([GROUP_KEYS, BLOCK_D])
    for tile in range(start, stop):
        step = first_step + tile - begin
        slot, phase = step % STAGES, (step // STAGES) & 1
        rows = tile * BLOCK_M + gl.arange(0, BLOCK_M, column)
        q = q_tiles.index(slot).reshape([BLOCK_M, BLOCK_D])
        do = do_tiles.index(slot).reshape([BLOCK_M, BLOCK_D])
        zeros = gl.zeros([GROUP_KEYS, BLOCK_M], gl.float32, s_layout)
        mbarrier.wait(q_full.index(slot), phase)
        scores = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(do_full.index(slot), phase)
        dp = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        p = gl.exp2(scores * scale_log2 - lse_tiles.index(slot).load(s_layout))
        if MASKED:
            keys = key + member * GROUP_KEYS + gl.arange(0, GROUP_KEYS, gl.SliceLayout(1, s_layout))
            seen = (keys < m)[:, None]
            if CAUSAL:
                seen = seen & (rows[None, :] + (m - n) >= keys[:, None])
            p = gl.where(seen, p, 0.0)
        p_low = gl.convert_layout(p.to(q_tiles.dtype), operand)
        dv = warpgroup_mma(p_low, do, dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=(dp,))
        ds = (p * (dp - delta_tiles.index(slot).load(s_layout))).to(q_tiles.dtype)
        mbarrier.wait(ds_empty, (step & 1) ^ 1)
        ds_tiles.index(member).store(ds)
        fence_async_shared()
        _release(ds_full)
        ds_low = gl.convert_layout(ds, operand)
        dk = warpgroup_mma(ds_low, q, dk, is_async=True)
        dv, p_low = warpgroup_mma_wait(1, deps=(dv, p_low))
        _release(do_empty.index(slot))
        mbarrier.wait(ds_full, step & 1)
        dq = _query_gradient(ds_tiles, k_tiles, member, BLOCK_M, BLOCK_D)
        tma.store_wait(0)  # the last part of dQ has left its place
        dq, dk, ds_low = warpgroup_mma_wait(0, deps=(dq, dk, ds_low))
        _release(q_empty.index(slot))
        mbarrier.arrive(ds_empty, count=1)
        dq_tiles.index(member).reshape([HALF, HALF]).store(dq)
        fence_async_shared()
        _barrier()
        if BLOCK_M > HALF:
            place = [batch, head, tile * BLOCK_M + member * HALF, 0]
        else:
            place = [batch, head, tile * BLOCK_M, member * HALF]
        _add_to_memory(DQ, place, dq_tiles.index(member))
    return dk, dv


@gluon.jit
def _put(descriptor, place, tile, value, BLOCK_D: gl.constexpr):
    """``value`` to memory by way of ``tile``."""
    tile.reshape([GROUP_KEYS, BLOCK_D]).store(value.to(tile.dtype))
    fence_async_shared()
    _barrier()
    tma.async_copy_shared_to_global(descriptor, place, tile)
    tma.store_wait(0)
    _barrier()


@gluon.jit
def _compute(
    DQ, DK, DV, q_tiles, k_tiles, v_tiles, do_tiles, lse_tiles, delta_tiles, ds_tiles, dq_tiles,
    kv_full, q_full, q_empty, do_full, do_empty, ds_full, ds_empty,
    scale, scale_log2, n, m, heads, kv_heads, all_kv_heads, member: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    HEADS_AT_ONCE: gl.constexpr,
):  # fmt: skip
    """One group: dK and dV of its 64 keys over all query heads that read them."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    key, batch, kv_head = _place(m, kv_heads, all_kv_heads, HEADS_AT_ONCE)
    begin, whole, tiles = _row_tiles(key, n, m, BLOCK_M, CAUSAL)
    dk = gl.zeros([GROUP_KEYS, BLOCK_D], gl.float32, acc_layout)
    dv = gl.zeros([GROUP_KEYS, BLOCK_D], gl.float32, acc_layout)
    group = heads // kv_heads
    mbarrier.wait(kv_full, 0)
    for place in range(group):
        head = kv_head * group + place
        dk, dv = _steps(
            dk, dv, DQ, q_tiles, k_tiles, v_tiles, do_tiles, lse_tiles, delta_tiles, ds_tiles, dq_tiles,
            q_full, q_empty, do_full, do_empty, ds_full, ds_empty,
            batch, head, place * (tiles - begin), begin, begin, whole, key, n, m, scale_log2,
            member, s_layout, acc_layout, BLOCK_M, BLOCK_D, STAGES, CAUSAL, True,
        )  # fmt: skip
        dk, dv = _steps(
            dk, dv, DQ, q_tiles, k_tiles, v_tiles, do_tiles, lse_tiles, delta_tiles, ds_tiles, dq_tiles,
            q_full, q_empty, do_full, do_empty, ds_full, ds_empty,
            batch, head, place * (tiles - begin), begin, whole, tiles, key, n, m, scale_log2,
            member, s_layout, acc_layout, BLOCK_M, BLOCK_D, STAGES, CAUSAL, False,
        )  # fmt: skip
    at = [batch, kv_head, key + member * GROUP_KEYS, 0]
    v_tile = v_tiles.index(member)  # this group alone reads it, and is through
    _put(DV, at, v_tile, dv, BLOCK_D)
    _put(DK, at, v_tile, dk * scale, BLOCK_D)


@gluon.jit
def backward_gluon_kernel(
    Q, K, V, DO, LSE_2, DELTA, DQ, DK, DV, scale, scale_log2, n, m, heads, kv_heads, all_kv_heads,
    BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    HEADS_AT_ONCE: gl.constexpr,
):  # fmt: skip
    """One program: dK and dV of 128 keys of one key-value head, and their part of dQ."""
    gl.static_assert(BLOCK_M // HALF * (BLOCK_D // HALF) == 2)  # two groups share dQ
    q_tiles = gl.allocate_shared_memory(Q.dtype, [STAGES] + Q.block_type.shape, Q.layout)
    do_tiles = gl.allocate_shared_memory(Q.dtype, [STAGES] + DO.block_type.shape, DO.layout)
    lse_tiles = gl.allocate_shared_memory(gl.float32, [STAGES] + LSE_2.block_type.shape, LSE_2.layout)
    delta_tiles = gl.allocate_shared_memory(gl.float32, [STAGES] + DELTA.block_type.shape, DELTA.layout)
    k_tiles = gl.allocate_shared_memory(K.dtype, [GROUPS] + K.block_type.shape, K.layout)
    v_tiles = gl.allocate_shared_memory(V.dtype, [GROUPS] + V.block_type.shape, V.layout)
    dq_tiles = gl.allocate_shared_memory(gl.float32, [GROUPS] + DQ.block_type.shape, DQ.layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    ds_tiles = gl.allocate_shared_memory(Q.dtype, [GROUPS, GROUP_KEYS, BLOCK_M], ds_layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ds_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ds_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, count=1)
    mbarrier.init(ds_full, count=GROUPS)
    mbarrier.init(ds_empty, count=GROUPS)
    for slot in gl.static_range(STAGES):
        mbarrier.init(q_full.index(slot), count=1)
        mbarrier.init(do_full.index(slot), count=1)
        mbarrier.init(q_empty.index(slot), count=GROUPS)
        mbarrier.init(do_empty.index(slot), count=GROUPS)
    fence_async_shared()
    _barrier()
    gl.warp_specialize(
        [
            (_compute, (DQ, DK, DV, q_tiles, k_tiles, v_tiles, do_tiles, lse_tiles, delta_tiles, ds_tiles, dq_tiles,
                        kv_full, q_full, q_empty, do_full, do_empty, ds_full, ds_empty,
                        scale, scale_log2, n, m, heads, kv_heads, all_kv_heads, 0,
                        BLOCK_M, BLOCK_D, STAGES, CAUSAL, HEADS_AT_ONCE)),
            (_compute, (DQ, DK, DV, q_tiles, k_tiles, v_tiles, do_tiles, lse_tiles, delta_tiles, ds_tiles, dq_tiles,
                        kv_full, q_full, q_empty, do_full, do_empty, ds_full, ds_empty,
                        scale, scale_log2, n, m, heads, kv_heads, all_kv_heads, 1,
                        BLOCK_M, BLOCK_D, STAGES, CAUSAL, HEADS_AT_ONCE)),
            (_load_tiles, (Q, K, V, DO, LSE_2, DELTA, q_tiles, k_tiles, v_tiles, do_tiles, lse_tiles, delta_tiles,
                           kv_full, q_full, q_empty,
                           do_full, do_empty, n, m, heads, kv_heads, all_kv_heads,
                           BLOCK_M, STAGES, CAUSAL, HEADS_AT_ONCE)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip
