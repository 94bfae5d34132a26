"""What the GPU would hold less, and for how many seconds, if something were moved off it between phases.

Computed from the phases' peaks: what is moved is not in the peak of the phases meanwhile. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainfit.spec.result import Lever, LoopMemory

BEFORE_UPDATE, AFTER_ROLLOUT = ("rollout", "scoring"), ("scoring", "update")


def levers(
    memory: Sequence[LoopMemory], host_bytes_per_s: float | None, capture_s: float
) -> tuple[Lever, ...]:
    """Return what moving the optimizer's state, the cache and gathered weights would give.

    Args:
        host_bytes_per_s: rate of copies between GPU and host, each way; None: not known.
        capture_s: seconds to record the step of decoding anew.
    """
    found = list[Lever]()
    state = _held(memory, "optimizer", BEFORE_UPDATE)
    if state and host_bytes_per_s:
        copied_s = 2 * state / host_bytes_per_s
        found.append(_lever(memory, "optimizer state to the host", BEFORE_UPDATE, state, copied_s))
    cache = _held(memory, "kv_cache", AFTER_ROLLOUT)
    if cache:
        moved = "cache of keys and values freed, and its graph recorded again"
        found.append(_lever(memory, moved, AFTER_ROLLOUT, cache, capture_s))
    return tuple(found)


def _held(memory: Sequence[LoopMemory], category: str, phases: Sequence[str]) -> int:
    sizes = [
        getattr(one.breakdown, category)
        for one in memory
        if one.phase in phases and one.breakdown is not None
    ]
    return min(sizes, default=0)


def _lever(
    memory: Sequence[LoopMemory], moved: str, phases: Sequence[str], num_bytes: int, seconds: float
) -> Lever:
    before = max(one.peak_allocated_bytes for one in memory)
    after = max(one.peak_allocated_bytes - num_bytes * (one.phase in phases) for one in memory)
    return Lever(
        moved=moved,
        during=" and ".join(phases),
        num_bytes=num_bytes,
        lower_bytes=before - after,
        seconds=seconds,
    )
