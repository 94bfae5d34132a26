"""Micro-batches that were left out of a trace, written out as copies of one that was traced. No torch here.

A step of many micro-batches is traced with its first three and its last; the third stands for those between.
The second and the third must be equal operation by operation and event by event, or nothing is copied.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from trainfit.ledger.ledger import ALLOCATE, FREE, Event, Ledger, Op, Storage

TRACED = 4
"""Micro-batches of a step that are traced: the first makes the gradients, the last may end the step."""


class MicroBatchesDifferError(RuntimeError):
    """Two micro-batches that are no ends of a step differ, so one cannot stand for others."""


def with_left_out(ledger: Ledger, left_out: int) -> Ledger:
    """Return the ledger with ``left_out`` more micro-batches after the third of each step.

    Args:
        ledger: of one rank, whose steps have TRACED micro-batches.

    Raises:
        MicroBatchesDifferError: the second and the third micro-batch of a step are not equal.
    """
    if ledger.collectives or ledger.held or ledger.emptied_at:
        raise MicroBatchesDifferError("a step that communicates, or empties the cache")
    for step in ("steady", "first"):  # The later one first: numbers before a copy stay as they are.
        ledger = _Copier(ledger, step).copied(left_out)
    return ledger


class _Span(NamedTuple):
    """The segments, events and operations of a micro-batch; of each the first, and the one after the last."""

    segments: tuple[int, int]
    events: tuple[int, int]
    ops: tuple[int, int]


@dataclass
class _Twins:
    """Which storages of a micro-batch are which of the next one."""

    made: list[int]
    """Storages that the micro-batch allocates."""
    of: dict[tuple[int, str], int]
    """Group and path, without the segment's number -> storage."""


class _Copier:
    """Copies the third micro-batch of one step.

    An example: each micro-batch k allocates its loss (A), which lives until the step ends, and a tensor (B)
    that the next one frees. Five micro-batches are traced as four, 0, 1, 2 and 4::

        +A0 +B0 | +A1 -B0 +B1 | +A2 -B1 +B2 | +A4 -B2 +B4 | -B4 -A0 -A1 -A2 -A4

    Micro-batch 3 is a copy of 2, with 3's storages for those of 2, and 2's for those of 1: ``+A3 -B2 +B3``.
    What it frees of the third (B2) is freed later as the last copy's (B3); what it does not free (A2) is
    freed together with that of each copy::

        +A0 +B0 | +A1 -B0 +B1 | +A2 -B1 +B2 | +A3 -B2 +B3 | +A4 -B3 +B4 | -B4 -A0 -A1 -A2 -A3 -A4
    """

    def __init__(self, ledger: Ledger, step: str):
        self.ledger, self.step = ledger, step
        first, second, third, last = self._spans()
        self.third, self.last = third, last
        before, own, twin = self._twins(first), self._twins(second), self._twins(third)
        self._check(second, third, before, own, twin)
        self.twin = twin
        self.chained = {
            twin.of[key] for key, index in own.of.items() if index in self._freed(third) and key in twin.of
        }
        """Storages of the third micro-batch that the one after it frees."""
        self.previous = {own.of[key]: index for key, index in twin.of.items()}
        """Storages of the second -> those of the third."""
        freed_at = {event.storage: at for at, event in enumerate(ledger.events) if event.kind == FREE}
        self.backwards = {
            index for made, index in self.previous.items() if freed_at.get(made, -1) > freed_at.get(index, -1)
        }
        """Storages of the third that are freed before those of the second: a list's, from its end."""

    def copied(self, left_out: int) -> Ledger:
        """Return the ledger with that many copies."""
        ledger, third, twin = self.ledger, self.third, self.twin
        num_segments, _, num_ops = (end - begin for begin, end in third)
        moved_segments, moved_ops = left_out * num_segments, left_out * num_ops
        segments, storages = list(ledger.segments), list(ledger.storages)
        end_segment, end_event, end_op = third.segments[1], third.events[1], third.ops[1]
        for number, storage in enumerate(storages):
            if storage.op >= end_op:
                storages[number] = storage._replace(op=storage.op + moved_ops)
        copies = list[dict[int, int]]()
        ops, events = list[Op](), list[Event]()
        for copy in range(1, left_out + 1):
            mapping = {index: len(storages) + at for at, index in enumerate(twin.made)}
            for index in twin.made:
                storages.append(_copy(ledger.storages[index], copy, num_ops, third.ops))
            sources = {made: (copies[-1] if copies else {}).get(index, index)
                       for made, index in self.previous.items()}  # fmt: skip
            copies.append(mapping)
            ops += [
                op._replace(segment=op.segment + copy * num_segments) for op in ledger.ops[slice(*third.ops)]
            ]
            for event in ledger.events[slice(*third.events)]:
                storage = mapping.get(event.storage, sources.get(event.storage, event.storage))
                segment = event.segment + copy * num_segments
                events.append(event._replace(storage=storage, segment=segment))
        later = [
            event._replace(storage=storage, segment=event.segment + moved_segments)
            for event in ledger.events[end_event:]
            for storage in self._freed_for(event, copies)
        ]
        return replace(
            ledger,
            segments=[
                *segments[:end_segment],
                *(ledger.segments[slice(*third.segments)] * left_out),
                *segments[end_segment:],
            ],
            ops=[
                *ledger.ops[:end_op],
                *ops,
                *(op._replace(segment=op.segment + moved_segments) for op in ledger.ops[end_op:]),
            ],
            storages=storages,
            events=[*ledger.events[:end_event], *events, *later],
            optional=[
                *ledger.optional,
                *(one[index] for one in copies for index in ledger.optional if index in one),
            ],
        )

    def _freed_for(self, event: Event, copies: list[dict[int, int]]) -> Iterable[int]:
        """Return the storages that an event after the third micro-batch stands for."""
        if event.kind == ALLOCATE or not copies or event.storage not in copies[0]:
            return (event.storage,)
        if event.storage in self.chained:
            return (copies[-1][event.storage],)
        every = (event.storage, *(one[event.storage] for one in copies))
        return every[::-1] if event.storage in self.backwards else every

    def _spans(self) -> list[_Span]:
        """Return the spans of the step's four micro-batches."""
        ledger = self.ledger
        backwards = [number for number, one in enumerate(ledger.segments) if one == (self.step, "backward")]
        if len(backwards) != TRACED:
            raise MicroBatchesDifferError(f"{len(backwards)} backward passes")
        spans = list[_Span]()
        event_segments = [event.segment for event in ledger.events]
        op_segments = [op.segment for op in ledger.ops]
        for number in backwards:
            if ledger.segments[number - 1] != (self.step, "forward"):
                raise MicroBatchesDifferError("a backward pass without a forward pass before it")
            segments = (number - 1, number + 1)
            spans.append(_Span(segments, _range(event_segments, segments), _range(op_segments, segments)))
        if any(a.segments[1] != b.segments[0] for a, b in pairwise(spans)):
            raise MicroBatchesDifferError("there is more between two micro-batches")
        return spans

    def _twins(self, span: _Span) -> _Twins:
        made = [event.storage for event in self.ledger.events[slice(*span.events)] if event.kind == ALLOCATE]
        return _Twins(made, {_key(self.ledger.storages[index]): index for index in made})

    def _freed(self, span: _Span) -> set[int]:
        return {event.storage for event in self.ledger.events[slice(*span.events)] if event.kind == FREE}

    def _check(self, second: _Span, third: _Span, before: _Twins, own: _Twins, twin: _Twins) -> None:
        """Compare the second micro-batch with the third."""
        ledger = self.ledger
        shift = third.segments[0] - second.segments[0]
        ours, theirs = (ledger.ops[slice(*span.ops)] for span in (second, third))
        # What the host ran before the first operation is of the micro-batch before, which made the gradients.
        theirs[0] = theirs[0]._replace(host=ours[0].host)
        if [op._replace(segment=op.segment + shift) for op in ours] != theirs:
            raise MicroBatchesDifferError("operations differ")
        if self._named(second, before, own, 0) != self._named(third, own, twin, shift):
            raise MicroBatchesDifferError("allocations or frees differ")
        if self._freed(self.last) & set(own.made):
            raise MicroBatchesDifferError("a storage lives into the micro-batch after the next")

    def _named(self, span: _Span, before: _Twins, own: _Twins, shift: int) -> list[object]:
        """Return the events of a micro-batch with the names of storages, not their numbers."""
        found = list[object]()
        storages = self.ledger.storages
        previous, made = set(before.made), set(own.made)
        for kind, index, group, segment in self.ledger.events[slice(*span.events)]:
            one = storages[index]
            if index in made:
                name: object = (*_key(one), *one[:2], max(one.op - span.ops[0], -1), one.stream)
            elif index in previous:
                name = _key(one)
            else:
                raise MicroBatchesDifferError(f"{one.path} is not of this micro-batch or the one before")
            found.append((kind, index in made, name, group, segment - shift))
        return found


def _copy(storage: Storage, copy: int, num_ops: int, ops: tuple[int, int]) -> Storage:
    """Return a copy's storage: its path has the number of the copy, so that paths stay different."""
    label, _, rest = storage.path.partition("/")
    op = storage.op + copy * num_ops if ops[0] <= storage.op < ops[1] else storage.op
    return storage._replace(op=op, path=f"{label}.{copy}/{rest}")


def _key(storage: Storage) -> tuple[int, str]:
    return storage.group, storage.path.partition("/")[2]


def _range(numbers: list[int], segments: tuple[int, int]) -> tuple[int, int]:
    """Return where the entries of some segments begin and end; they must lie together."""
    at = [place for place, number in enumerate(numbers) if segments[0] <= number < segments[1]]
    if not at or at[-1] - at[0] + 1 != len(at):
        raise MicroBatchesDifferError("entries of a micro-batch do not lie together")
    return at[0], at[-1] + 1
