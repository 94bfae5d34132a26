"""Explain a memory snapshot of PyTorch: who held memory at the peak, and what would have fitted."""

from collections.abc import Callable
from pathlib import Path

from trainfit.explanation.peak import Explained, memory_of
from trainfit.explanation.snapshot.read import NO_STACK, Snapshot, read_snapshot
from trainfit.explanation.snapshot.replay import Course, course_of, reserved_with
from trainfit.explanation.snapshot.to_ledger import ledger_of_snapshot
from trainfit.ledger.allocator import CachingAllocator, OutOfMemory
from trainfit.ledger.replay import replay
from trainfit.spec.errors import InputError
from trainfit.spec.explanation import Explanation, FailedRequest, SnapshotFacts

Advance = Callable[[int, int], None]


def explain_snapshot(
    path: Path, device: int | None = None, advance: Advance = lambda at, of: None
) -> Explanation:
    """Explain the peak of one device in a memory snapshot; arguments as ``explained_snapshot`` takes them."""
    return explained_snapshot(path, device, advance).explanation


def explained_snapshot(
    path: Path, device: int | None = None, advance: Advance = lambda at, of: None
) -> Explained:
    """Return the explanation of one device's peak in a memory snapshot, with its ledger.

    The file is read as data; nothing is executed.

    Args:
        device: its number; None: the one with the most events.
        advance: called now and then with the bytes of the file that were read, and all.

    Raises:
        InputError: the file is no snapshot, or has no history of that device.
    """
    snapshot = read_snapshot(path, advance)
    chosen = _device(snapshot, device, path)
    course = course_of(snapshot, chosen)
    ledger = ledger_of_snapshot(snapshot, chosen, course)
    if not ledger.storages:
        problem = "nothing was allocated while its history was recorded"
        raise InputError(problem, "record the history while the model trains", file=str(path))
    events = snapshot.events[chosen]
    is_expandable = snapshot.settings.get("expandable_segments") is True
    try:
        replayed = replay(ledger, CachingAllocator(expandable_segments=is_expandable))
        expandable = reserved_with(events, course, expandable=True)
    except OutOfMemory:  # More than a GPU's addresses
        remedy = "save it again; the file may be damaged"
        raise InputError("its sizes are no GPU's", remedy, file=str(path)) from None
    facts = SnapshotFacts(
        file=str(path),
        device=chosen,
        num_events=len(events),
        is_whole=not course.initial,
        reserved_at_peak_bytes=course.reserved_at_peak,
        peak_reserved_bytes=course.peak_reserved,
        expandable_reserved_bytes=expandable,
        is_expandable=is_expandable,
        has_stacks=any(stack != NO_STACK for stack in events.stacks),
        failed=_failed(snapshot, chosen, course),
    )
    explanation = Explanation(snapshot=facts, **memory_of(ledger, replayed))
    return Explained(explanation, ledger, expandable=is_expandable)


def _device(snapshot: Snapshot, device: int | None, path: Path) -> int:
    numbers = [len(events) for events in snapshot.events]
    if not any(numbers):
        remedy = "call torch.cuda.memory._record_memory_history() before the steps, and save it after them"
        raise InputError("its history is empty: memory was not recorded", remedy, file=str(path))
    if device is None:
        return numbers.index(max(numbers))
    if device >= len(numbers) or not numbers[device]:
        there = ", ".join(str(number) for number, events in enumerate(numbers) if events)
        raise InputError(
            "it has no history of this device", f"use one of {there}", field="device", value=device
        )
    return device


def _failed(snapshot: Snapshot, device: int, course: Course) -> FailedRequest | None:
    events = snapshot.events[device]
    if course.last == len(events):
        return None
    return FailedRequest(
        num_bytes=events.sizes[course.last],
        allocated_bytes=course.allocated,
        reserved_bytes=course.reserved,
        free_bytes=events.addresses[course.last],
    )
