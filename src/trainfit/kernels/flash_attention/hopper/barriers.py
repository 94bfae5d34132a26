# Gluon's compiler reads these functions, and it knows neither starred lists nor Python's types.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false
"""How groups of four warps, and a loading warp, wait for one another on Hopper, in Gluon.

Named barriers are the hardware's own (PTX ISA, bar.sync and bar.arrive): threads may arrive at one and go on.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

GROUP_THREADS = gl.constexpr(128)
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # its name from Triton 3.7 on, and before


@gluon.jit
def _wait_for(barrier, threads: gl.constexpr, warps: gl.constexpr):
    """This group, or the loading warp, waits at a named barrier until ``threads`` in all are there."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])
    which = gl.full([32 * warps], barrier, gl.int32, layout)
    many = gl.full([32 * warps], threads, gl.int32, layout)
    gl.inline_asm_elementwise(
        "bar.sync $1, $2; mov.u32 $0, 0;", "=r,r,r,~{memory}", [which, many],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _arrive_at(barrier, threads: gl.constexpr):
    """This group has come to a named barrier and goes on."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    which = gl.full([GROUP_THREADS], barrier, gl.int32, layout)
    many = gl.full([GROUP_THREADS], threads, gl.int32, layout)
    gl.inline_asm_elementwise(
        "bar.arrive $1, $2; mov.u32 $0, 0;", "=r,r,r,~{memory}", [which, many],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _release(barrier):
    """All warps of the group are through with what the barrier guards."""
    _barrier()
    mbarrier.arrive(barrier, count=1)
