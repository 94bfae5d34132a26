"""Check that the three traced slices of a compiled program do the same. No torch here.

Compiled code frees and reuses memory where layers follow each other, so equal forwards do not suffice: each
operation, allocation and free of the slices must agree, and what a slice takes over from its neighbours.
"""

from collections import Counter
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
    Op,
    RepeatError,
    part_of,
)

PARTS = (FIRST, MIDDLE, LAST)
NO_HOST = (0, 0, 0)
"""Of the first kernel of the first slice, what the host ran before belongs to the model's end."""
FURTHEST = 2
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
        kernels = [
            [
                op._replace(module="", group=MIDDLE, host=NO_HOST)
                for op in ledger.ops
                if _is_kernel(op, number, part)
            ]
            for part in PARTS
        ]
        if kernels[FIRST] != kernels[MIDDLE] or kernels[MIDDLE] != kernels[LAST]:
            raise RepeatError(f"the layers' kernels differ in the {segment.phase}")
        events = [event for event in ledger.events if event.segment == number]
        # The first to run finds nothing to reuse: the second and the third must agree.
        middle, third = (
            _runs(ledger, events, part) for part in (MIDDLE, FIRST if segment.phase == "backward" else LAST)
        )
        if len(middle) != len(third) or not all(map(_alike, middle, third)):
            raise RepeatError(f"the layers' allocations differ in the {segment.phase}")
        _check_ends(ledger, events)


def _is_kernel(op: Op, segment: int, part: int) -> bool:
    return op.segment == segment and op.group == part and not op.name.startswith("aten.empty_strided")


def _check_ends(ledger: Ledger, events: list[Event]) -> None:
    """Check that kernels outside the layers free no more than what the nearest two slices allocated."""
    nearest = LAST
    for event in events:
        if event.group != NO_LAYER:
            nearest = part_of(event.group)
        made_in = ledger.storages[event.storage].slice
        if event.group == NO_LAYER and made_in in (FIRST, LAST) and nearest == FIRST + LAST - made_in:
            raise RepeatError(f"{ledger.storages[event.storage].path} is freed after all layers")


def _runs(ledger: Ledger, events: list[Event], part: int) -> list[tuple[int, list[_Change]]]:
    """Return the slice's allocations and frees in turns, each as many as follow each other."""
    inside = (event for event in events if event.group == part)
    runs = groupby(inside, key=lambda event: event.kind)
    return [(kind, [_change(ledger, event) for event in run]) for kind, run in runs]


def _change(ledger: Ledger, event: Event) -> _Change:
    s = ledger.storages[event.storage]
    if s.slice is not None:
        return _Change(s.num_bytes, s.slice - event.group, s.twin_path)
    return _Change(s.num_bytes, None if s.group == NO_LAYER else s.group - event.group, s.path)


def _alike(pattern: tuple[int, list[_Change]], third: tuple[int, list[_Change]]) -> bool:
    """Return whether a run of changes of the third slice to run is that of the second.

    Frees that follow each other have no order. The third slice may free what a slice on its other side, where
    none is known, allocated: sizes are compared. It may also free what no further layer reuses.
    """
    if pattern[0] != third[0] or pattern[0] == ALLOCATE:
        return pattern == third
    expected, found = Counter(pattern[1]), Counter(third[1])
    unknown = Counter({change: count for change, count in found.items() if change.distance is None})
    missing = expected - found
    return (
        all(change.distance in range(-FURTHEST, FURTHEST + 1) for change in expected)
        and found - unknown <= expected
        and all(change.distance for change in missing)
        and _sizes(missing) <= _sizes(unknown)
    )


def _sizes(changes: Counter[_Change]) -> Counter[int]:
    return Counter(change.num_bytes for change in changes.elements())
