# Gluon's compiler supports neither starred lists nor Python's types in these functions.
# ruff: noqa: RUF005
# pyright: reportCallIssue=false, reportArgumentType=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false
"""FlashAttention's backward for Hopper in Gluon: one warp loads by TMA, two groups of four warps compute.

A program owns 128 keys and values, a group 64 of them. Scores are transposed, [keys, queries], so P and dS
are register operands of the products for dV and dK. Through shared memory each group reads both groups' dS
for its half of dQ, which TMA adds in fp32 to memory in thread order (Shah et al. 2024, FlashAttention-3,
arXiv:2407.08608, section 3 and appendix B). The order of these additions varies between runs.

dS is double-buffered, and a step's part of dQ is computed in the next step, overlapping its softmax. The
groups alternate in issuing scores, so one's softmax overlaps the other's products. Named barriers signal that
dS is written, that it is read, and whose turn it is.

Row sums and ``lse`` come from prepare_tma_kernel; BLOCK_D is 64 or 128.
"""

from __future__ import annotations

from typing import Any

from triton._C.libtriton import ir  # TMA reduction is not in Gluon's API
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

from trainfit.kernels.flash_attention.hopper.pipeline import GROUP_THREADS, _arrive_at, _barrier, _wait_for

GROUP_KEYS = gl.constexpr(64)
GROUPS = gl.constexpr(2)
HALF = gl.constexpr(64)  # Rows and columns of a group's half of dQ
DS_BUFFERS = gl.constexpr(2)
EMPTY = gl.constexpr(4)  # Triton uses the named barriers 0 to 3 (CUDA has 16)
TURN = gl.constexpr(6)
DS_FULL = gl.constexpr(8)
DS_EMPTY = gl.constexpr(12)


@builtin
def _add_to_memory(descriptor, coordinates, tile, _semantic: Any = None):
    """Start adding ``tile`` to global memory by TMA's reduction."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coordinates, tile.handle
    )


@gluon.jit
def _position(m, kv_heads, all_kv_heads, HEADS_AT_ONCE: gl.constexpr):
    """Return the program's first key, batch and key-value head; the first keys have the most queries."""
    BLOCK_N: gl.constexpr = GROUPS * GROUP_KEYS
    blocks = gl.cdiv(m, BLOCK_N)
    program = gl.program_id(0)
    first_head = program // (HEADS_AT_ONCE * blocks) * HEADS_AT_ONCE
    num_heads = gl.minimum(HEADS_AT_ONCE, all_kv_heads - first_head)
    index = program - first_head * blocks
    batch_head = first_head + index % num_heads
    return index // num_heads * BLOCK_N, batch_head // kv_heads, batch_head % kv_heads


@gluon.jit
def _row_tiles(key, n, m, BLOCK_M: gl.constexpr, CAUSAL: gl.constexpr):
    """Return the first tile of rows for these keys, the first without a mask, and the number of tiles."""
    BLOCK_N: gl.constexpr = GROUPS * GROUP_KEYS
    tiles = gl.cdiv(n, BLOCK_M)
    begin, whole = 0, 0
    if CAUSAL:
        begin = gl.minimum(tiles, gl.maximum(0, key - (m - n)) // BLOCK_M)
        whole = gl.minimum(tiles, gl.cdiv(gl.maximum(0, key + BLOCK_N - 1 - (m - n)), BLOCK_M))
    if key + BLOCK_N > m:
        whole = tiles  # keys past the end must not contribute to dQ
    return begin, whole, tiles


@gluon.jit
def _load_tiles(
    Q, K, V, DO, LSE_2, DELTA, q_tiles, k_tiles, v_tiles, do_tiles, lse_tiles, delta_tiles, k_full, v_full,
    q_full, do_full, n, m, heads, kv_heads, all_kv_heads,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, HEADS_AT_ONCE: gl.constexpr,
):  # fmt: skip
    """Load keys and values once, then queries and output gradients as buffers become free (loading warp)."""
    readers: gl.constexpr = GROUPS * GROUP_THREADS + 32
    key, batch, kv_head = _position(m, kv_heads, all_kv_heads, HEADS_AT_ONCE)
    begin, _, tiles = _row_tiles(key, n, m, BLOCK_M, CAUSAL)
    mbarrier.expect(k_full, GROUPS * K.block_type.nbytes)
    for member in gl.static_range(GROUPS):
        tma.async_copy_global_to_shared(
            K, [batch, kv_head, key + member * GROUP_KEYS, 0], k_full, k_tiles.index(member)
        )
    group, per_head = heads // kv_heads, tiles - begin
    for step in range(group * per_head):
        head, row = kv_head * group + step // per_head, (begin + step % per_head) * BLOCK_M
        stage = step % STAGES
        if step >= STAGES:
            _wait_for(EMPTY + stage, readers, 1)  # of the queries and the output gradients
        mbarrier.expect(q_full.index(stage), Q.block_type.nbytes + LSE_2.block_type.nbytes)
        tma.async_copy_global_to_shared(Q, [batch, head, row, 0], q_full.index(stage), q_tiles.index(stage))
        tma.async_copy_global_to_shared(
            LSE_2, [batch * heads + head, row], q_full.index(stage), lse_tiles.index(stage)
        )
        if step == 0:
            mbarrier.expect(v_full, GROUPS * V.block_type.nbytes)
            for member in gl.static_range(GROUPS):
                at = [batch, kv_head, key + member * GROUP_KEYS, 0]
                tma.async_copy_global_to_shared(V, at, v_full, v_tiles.index(member))
        mbarrier.expect(do_full.index(stage), DO.block_type.nbytes + DELTA.block_type.nbytes)
        tma.async_copy_global_to_shared(
            DO, [batch, head, row, 0], do_full.index(stage), do_tiles.index(stage)
        )
        tma.async_copy_global_to_shared(
            DELTA, [batch * heads + head, row], do_full.index(stage), delta_tiles.index(stage)
        )


@gluon.jit
def _query_gradient(
    ds_tiles, k_tiles, buffer, member: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr
):
    """Start this group's half of dS K over both groups' keys: half the rows of 128, else half the columns."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    dq = gl.zeros([HALF, HALF], gl.float32, layout)
    for part in gl.static_range(GROUPS):
        ds = ds_tiles.index(buffer * GROUPS + part)
        k = k_tiles.index(part).reshape([GROUP_KEYS, BLOCK_D])
        if BLOCK_M > HALF:
            ds = ds.slice(member * HALF, HALF, dim=1)
        if BLOCK_D > HALF:
            k = k.slice(member * HALF, HALF, dim=1)
        dq = warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=part > 0, is_async=True)
    return dq


@gluon.jit
def _in_thread_order(dq):
    """Permute a half of dQ to [32, 128], in which each thread's 16 bytes are contiguous."""
    return dq.reshape([4, 2, 8, 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([32, 128])


@gluon.jit
def _add(
    DQ, dq_tiles, dq, batch_head, rows_padded, tile, enabled, member: gl.constexpr, BLOCK_M: gl.constexpr
):
    """Add this group's half of a tile of dQ to memory if ``enabled``, through its shared tile."""
    dq_tiles.index(member).store(_in_thread_order(dq))
    fence_async_shared()
    _barrier()
    if enabled:
        coordinates = [(batch_head * (rows_padded // BLOCK_M) + tile) * 64 + member * 32, 0]
        _add_to_memory(DQ, coordinates, dq_tiles.index(member))


@gluon.jit
def _probabilities(
    scores, lse_2, tile, whole, key, n, m, scale_log2,
    member: gl.constexpr, s_layout: gl.constexpr, BLOCK_M: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Return P transposed, [keys, queries]; tiles before ``whole`` are masked."""
    p = gl.exp2(scores * scale_log2 - lse_2)
    if tile < whole:
        keys = key + member * GROUP_KEYS + gl.arange(0, GROUP_KEYS, gl.SliceLayout(1, s_layout))
        visible = (keys < m)[:, None]
        if CAUSAL:
            rows = tile * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, s_layout))
            visible = visible & (rows[None, :] + (m - n) >= keys[:, None])
        p = gl.where(visible, p, 0.0)
    return p


@gluon.jit
def _store(descriptor, coordinates, tile, value, BLOCK_D: gl.constexpr):
    """Store ``value`` to memory through the shared ``tile``."""
    tile.reshape([GROUP_KEYS, BLOCK_D]).store(value.to(tile.dtype))
    fence_async_shared()
    _barrier()
    tma.async_copy_shared_to_global(descriptor, coordinates, tile)
    tma.store_wait(0)
    _barrier()


@gluon.jit
def _compute(
    DQ, DK, DV, rows_padded, q_tiles, k_tiles, v_tiles, do_tiles, lse_tiles, delta_tiles, ds_tiles, dq_tiles,
    k_full, v_full, q_full, do_full, scale, scale_log2, n, m, heads, kv_heads, all_kv_heads,
    member: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, HEADS_AT_ONCE: gl.constexpr,
):  # fmt: skip
    """Compute dK and dV of a group's 64 keys over all of their query heads (one group)."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    both: gl.constexpr = GROUPS * GROUP_THREADS
    readers: gl.constexpr = both + 32
    other: gl.constexpr = 1 - member
    key, batch, kv_head = _position(m, kv_heads, all_kv_heads, HEADS_AT_ONCE)
    begin, whole, tiles = _row_tiles(key, n, m, BLOCK_M, CAUSAL)
    dk = gl.zeros([GROUP_KEYS, BLOCK_D], gl.float32, acc_layout)
    dv = gl.zeros([GROUP_KEYS, BLOCK_D], gl.float32, acc_layout)
    zeros = gl.zeros([GROUP_KEYS, BLOCK_M], gl.float32, s_layout)
    k = k_tiles.index(member).reshape([GROUP_KEYS, BLOCK_D])
    v = v_tiles.index(member).reshape([GROUP_KEYS, BLOCK_D])
    group = heads // kv_heads
    head, tile = kv_head * group, begin
    # Distinct initial values: Triton treats a name as constant in a loop if it starts with the same value as
    # the name that the loop assigns to it (``last_tile = tile``, both ``begin``).
    last_head, last_tile = head - 1, begin - 1
    steps = group * (tiles - begin)
    mbarrier.wait(k_full, 0)
    for step in range(steps):
        stage, phase = step % STAGES, (step // STAGES) & 1
        q = q_tiles.index(stage).reshape([BLOCK_M, BLOCK_D])
        do = do_tiles.index(stage).reshape([BLOCK_M, BLOCK_D])
        buffer = step & 1
        mbarrier.wait(q_full.index(stage), phase)
        if step == 0:
            mbarrier.wait(v_full, 0)
        if member + step > 0:
            _wait_for(TURN + member, both, 4)
        scores = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
        if step > 0:
            _wait_for(DS_FULL + other * DS_BUFFERS + (buffer ^ 1), both, 4)
        dq = _query_gradient(ds_tiles, k_tiles, buffer ^ 1, member, BLOCK_M, BLOCK_D)  # of the last step
        _arrive_at(TURN + other, both)  # its softmax overlaps these products
        lse_2 = lse_tiles.index(stage).load(s_layout)
        scores = warpgroup_mma_wait(GROUPS, deps=(scores,))  # dQ's products, one per group, keep running
        p = _probabilities(
            scores, lse_2, tile, whole, key, n, m, scale_log2, member, s_layout, BLOCK_M, CAUSAL
        )
        dq = warpgroup_mma_wait(0, deps=(dq,))
        if step > 0:
            _arrive_at(DS_EMPTY + member * DS_BUFFERS + (buffer ^ 1), both)
        _add(DQ, dq_tiles, dq, batch * heads + last_head, rows_padded, last_tile, step > 0, member, BLOCK_M)
        mbarrier.wait(do_full.index(stage), phase)
        dp = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
        p_low = gl.convert_layout(p.to(q_tiles.dtype), operand)
        dv = warpgroup_mma(p_low, do, dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=(dp,))
        ds = (p * (dp - delta_tiles.index(stage).load(s_layout))).to(q_tiles.dtype)
        if step >= DS_BUFFERS:
            _wait_for(DS_EMPTY + other * DS_BUFFERS + buffer, both, 4)
        ds_tiles.index(buffer * GROUPS + member).store(ds)
        fence_async_shared()
        tma.store_wait(0)  # frees the tile of dQ, with the barrier below
        _barrier()
        _arrive_at(DS_FULL + member * DS_BUFFERS + buffer, both)
        ds_low = gl.convert_layout(ds, operand)
        dk = warpgroup_mma(ds_low, q, dk, is_async=True)
        dv, p_low, dk, ds_low = warpgroup_mma_wait(0, deps=(dv, p_low, dk, ds_low))
        _arrive_at(EMPTY + stage, readers)
        last_head, last_tile = head, tile
        tile += 1
        if tile == tiles:
            tile = begin
            head += 1
    if steps > 0:
        _wait_for(DS_FULL + other * DS_BUFFERS + ((steps - 1) & 1), both, 4)
    dq = _query_gradient(ds_tiles, k_tiles, (steps - 1) & 1, member, BLOCK_M, BLOCK_D)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    _add(DQ, dq_tiles, dq, batch * heads + last_head, rows_padded, last_tile, steps > 0, member, BLOCK_M)
    at = [batch, kv_head, key + member * GROUP_KEYS, 0]
    v_tile = v_tiles.index(member)  # read by this group only, which has finished
    _store(DV, at, v_tile, dv, BLOCK_D)
    _store(DK, at, v_tile, dk * scale, BLOCK_D)


@gluon.jit
def backward_gluon_kernel(
    Q, K, V, DO, LSE_2, DELTA, DQ, DK, DV, rows_padded, scale, scale_log2, n, m, heads, kv_heads,
    all_kv_heads, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    HEADS_AT_ONCE: gl.constexpr,
):  # fmt: skip
    """Compute dK and dV of 128 keys of one key-value head per program, and add their part of dQ."""
    gl.static_assert(BLOCK_M // HALF * (BLOCK_D // HALF) == 2)  # two groups share dQ
    gl.static_assert(STAGES == 2)  # the barriers EMPTY and EMPTY + 1
    q_tiles = gl.allocate_shared_memory(Q.dtype, [STAGES] + Q.block_type.shape, Q.layout)
    do_tiles = gl.allocate_shared_memory(Q.dtype, [STAGES] + DO.block_type.shape, DO.layout)
    lse_tiles = gl.allocate_shared_memory(gl.float32, [STAGES] + LSE_2.block_type.shape, LSE_2.layout)
    delta_tiles = gl.allocate_shared_memory(gl.float32, [STAGES] + DELTA.block_type.shape, DELTA.layout)
    k_tiles = gl.allocate_shared_memory(K.dtype, [GROUPS] + K.block_type.shape, K.layout)
    v_tiles = gl.allocate_shared_memory(V.dtype, [GROUPS] + V.block_type.shape, V.layout)
    dq_tiles = gl.allocate_shared_memory(gl.float32, [GROUPS] + DQ.block_type.shape, DQ.layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    ds_tiles = gl.allocate_shared_memory(Q.dtype, [DS_BUFFERS * GROUPS, GROUP_KEYS, BLOCK_M], ds_layout)
    k_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(k_full, count=1)
    mbarrier.init(v_full, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(q_full.index(stage), count=1)
        mbarrier.init(do_full.index(stage), count=1)
    fence_async_shared()
    _barrier()
    gl.warp_specialize(
        [
            (_compute, (DQ, DK, DV, rows_padded, q_tiles, k_tiles, v_tiles, do_tiles, lse_tiles, delta_tiles,
                        ds_tiles, dq_tiles, k_full, v_full, q_full, do_full, scale, scale_log2, n, m, heads,
                        kv_heads, all_kv_heads, 0, BLOCK_M, BLOCK_D, STAGES, CAUSAL, HEADS_AT_ONCE)),
            (_compute, (DQ, DK, DV, rows_padded, q_tiles, k_tiles, v_tiles, do_tiles, lse_tiles, delta_tiles,
                        ds_tiles, dq_tiles, k_full, v_full, q_full, do_full, scale, scale_log2, n, m, heads,
                        kv_heads, all_kv_heads, 1, BLOCK_M, BLOCK_D, STAGES, CAUSAL, HEADS_AT_ONCE)),
            (_load_tiles, (Q, K, V, DO, LSE_2, DELTA, q_tiles, k_tiles, v_tiles, do_tiles, lse_tiles,
                           delta_tiles, k_full, v_full, q_full, do_full, n, m, heads, kv_heads, all_kv_heads,
                           BLOCK_M, STAGES, CAUSAL, HEADS_AT_ONCE)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip
