"""The course of a snapshot's memory, and what expandable segments would have reserved."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from trainfit.explanation.snapshot.read import NO_STACK, NUMBERS, Events, Segment, Snapshot
from trainfit.ledger.allocator import CachingAllocator
from trainfit.ledger.segments import rounded

ALLOC, FREE = NUMBERS["alloc"], NUMBERS["free_requested"]
TAKES = (NUMBERS["segment_alloc"], NUMBERS["segment_map"])
GIVES = (NUMBERS["segment_free"], NUMBERS["segment_unmap"])
OUT_OF_MEMORY = NUMBERS["oom"]


class Alive(NamedTuple):
    """An allocation that is alive at some moment."""

    address: int
    num_bytes: int
    """Rounded up to the allocator's 512 bytes."""
    stream: int
    stack: int


class Course(NamedTuple):
    """One device's memory over the recorded events, up to the last request that failed."""

    initial: tuple[Alive, ...]
    """Alive before the first event."""
    last: int
    """Number of events that count: all, or those before the failed request."""
    reserved_at_peak: int
    peak_reserved: int
    allocated: int
    """After the last event that counts, as reserved."""
    reserved: int


def course_of(snapshot: Snapshot, device: int) -> Course:
    """Return the course of a device's memory.

    What the history began with is not recorded: it is what is alive at the end, or freed, without having been
    allocated in between; and the segments at the end without those that events added.
    """
    events = snapshot.events[device]
    segments = [one for one in snapshot.segments if one.device == device]
    initial = _initial(events, segments)
    reserved = max(0, sum(one.num_bytes for one in segments) - sum(_reserves(events)))
    alive = {one.address: one.num_bytes for one in initial}
    allocated = sum(alive.values())
    peak, at_peak, most = allocated, reserved, reserved
    last = len(events)
    for index in range(len(events) - 1, -1, -1):
        if events.actions[index] == OUT_OF_MEMORY:
            last = index
            break
    for action, address, size, _ in islice(events.rows(), last):
        if action == ALLOC:
            alive[address] = rounded(size)
            allocated += alive[address]
            if allocated > peak:
                peak, at_peak = allocated, reserved
        elif action == FREE:
            allocated -= alive.pop(address, 0)
        elif action in TAKES:
            reserved += size
            most = max(most, reserved)
        elif action in GIVES:
            reserved = max(0, reserved - size)
    return Course(tuple(initial), last, at_peak, most, allocated, reserved)


def reserved_with(events: Events, course: Course, *, expandable: bool) -> int:
    """Return the highest reserved bytes, had the allocator started anew and served the same requests.

    Args:
        expandable: with ``expandable_segments:True``.
    """
    allocator = CachingAllocator(expandable_segments=expandable)
    handles = {one.address: allocator.malloc(one.num_bytes, one.stream) for one in course.initial}
    for action, address, size, stream in islice(events.rows(), course.last):
        if action == ALLOC:
            if (left := handles.pop(address, 0)) != 0:
                allocator.free(left)  # Its free is missing: the history is not whole.
            handles[address] = allocator.malloc(size, stream)
        elif action == FREE:
            allocator.free(handles.pop(address, 0))
    return allocator.peak_reserved_bytes


def _initial(events: Events, segments: list[Segment]) -> list[Alive]:
    born: set[int] = set()
    found: dict[int, Alive] = {}
    for action, address, size, stream in events.rows():
        if action == ALLOC:
            born.add(address)
        elif action == FREE:
            if address not in born:
                found.setdefault(address, Alive(address, rounded(size), stream, NO_STACK))
            born.discard(address)
    for segment in segments:
        for block in segment.blocks:
            if block.is_active and block.address not in born and block.address not in found:
                found[block.address] = Alive(block.address, block.num_bytes, segment.stream, block.stack)
    return list(found.values())


def _reserves(events: Events) -> Iterator[int]:
    """Yield the change of the reserved bytes by each event that has one."""
    for action, _, size, _ in events.rows():
        if action in TAKES:
            yield size
        elif action in GIVES:
            yield -size
