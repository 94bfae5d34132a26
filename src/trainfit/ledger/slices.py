"""Check that the three traced slices of a compiled program do the same. No torch here.

Compiled code frees and reuses memory where layers follow each other, so equal forwards do not suffice: each
operation, allocation and free of the slices must agree, and what a slice takes over from its neighbours.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from trainfit.ledger.ledger import (
    ALLOCATE,
    FIRST,
    LAST,
    MIDDLE,
    NO_LAYER,
    Event,
    Ledger,
    RepeatError,
    part_of,
)

PARTS = (FIRST, MIDDLE, LAST)
FURTHEST = 3
"""Slices between allocation and free at most: each of the three has two neighbours on a side."""


class _Change(NamedTuple):
    """An event as it is alike in all slices."""

    num_bytes: int
    distance: int | None
    """From the slice of the event to that which allocated; None: allocated outside the slices."""
    path: str


def check_slices(ledger: Ledger) -> None:
    """Check the operations, allocations and frees of the forward and the backward.

    Raises:
        RepeatError: the slices differ, so that the middle one cannot stand for others.
    """
    for number, segment in enumerate(ledger.segments):
        if segment.phase not in ("forward", "backward"):
            continue
        events = [event for event in ledger.events if event.segment == number]
        first, middle, last = (
            [
                op._replace(module="", group=MIDDLE)
                for op in ledger.ops
                if (op.segment, op.group) == (number, part)
            ]
            for part in PARTS
        )
        if not first == middle == last:
            raise RepeatError(f"the layers' kernels differ in the {segment.phase}")
        first, middle, last = (list(_runs(ledger, events, part)) for part in PARTS)
        if not len(first) == len(middle) == len(last):
            raise RepeatError(f"the layers' allocations differ in the {segment.phase}")
        for pattern, *others in zip(middle, first, last, strict=True):
            if any(not _alike(pattern, *other) for other in others):
                raise RepeatError(f"the layers' allocations differ in the {segment.phase}")
        _check_ends(ledger, events)


def _check_ends(ledger: Ledger, events: list[Event]) -> None:
    """Check that kernels outside the layers free no more than what the nearest two slices allocated."""
    nearest = LAST
    for event in events:
        if event.group != NO_LAYER:
            nearest = part_of(event.group)
        made_in = ledger.storages[event.storage].slice
        if event.group == NO_LAYER and made_in in (FIRST, LAST) and nearest == FIRST + LAST - made_in:
            raise RepeatError(f"{ledger.storages[event.storage].path} is freed after all layers")


def _runs(ledger: Ledger, events: list[Event], part: int) -> Iterator[tuple[int, list[_Change]]]:
    """Yield the slice's allocations and frees in turns, each as many as follow each other."""
    inside = (event for event in events if event.group == part)
    for kind, run in groupby(inside, key=lambda event: event.kind):
        yield kind, [_change(ledger, event) for event in run]


def _change(ledger: Ledger, event: Event) -> _Change:
    s = ledger.storages[event.storage]
    if s.slice is not None:
        return _Change(s.num_bytes, s.slice - event.group, s.twin_path)
    return _Change(s.num_bytes, None if s.group == NO_LAYER else s.group - event.group, s.path)


def _alike(pattern: tuple[int, list[_Change]], kind: int, changes: list[_Change]) -> bool:
    """Return whether a run of changes of the first or last slice is that of the middle one.

    Frees that follow each other have no order. Where the slice has no neighbour, sizes alone are compared.
    """
    if pattern[0] != kind or kind == ALLOCATE:
        return pattern == (kind, changes)
    expected, found = Counter(pattern[1]), Counter(changes)
    unknown = +Counter({change: count for change, count in found.items() if change.distance is None})
    missing = expected - found
    return (
        all(change.distance in range(-FURTHEST, FURTHEST + 1) for change in expected)
        and found - unknown <= expected
        and all(change.distance for change in missing)
        and _sizes(missing) == _sizes(unknown)
    )


def _sizes(changes: Counter[_Change]) -> Counter[int]:
    return Counter(change.num_bytes for change in changes.elements())
