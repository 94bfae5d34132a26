# Gluon's compiler supports neither starred lists nor Python's types in these functions.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false
"""Synchronisation between groups of four warps and a loading warp on Hopper, in Gluon.

Named barriers (PTX ISA, bar.sync and bar.arrive) let threads arrive without waiting.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

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
