"""A memory snapshot as a ledger, so that it is replayed, explained and compared as a prediction is.

A snapshot knows no steps, phases or categories. They follow from the stacks and from how long memory lives.
Worked example, a step of a model with one layer; ``f``, ``b``, ``o`` are allocations whose stacks are of a
forward, of the backward and of the optimizer:

    event      f1   f2  -f2   b1   b2  -f1  -b2   o1   o2  -o1   f3 ...
    phase      forward        backward            optimizer      forward

- f1 is alive when the backward begins: *activations*. f2 is not: *temporary*.
- b1 is alive when the optimizer begins, or the next forward, as a fused update may allocate nothing:
  *gradients*. b2 is not: *temporary*.
- o2 is alive when the next phase begins: *optimizer* (its state). o1 is not: *temporary*.

What is alive before the first event, or made before the first forward and never freed, is *weights*.

A snapshot that a ledger was exported as (``ledger/snapshot.py``) says phase and category itself.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import islice, pairwise
from typing import NamedTuple

from trainfit.explanation.snapshot.read import NO_STACK, Events, Snapshot
from trainfit.explanation.snapshot.replay import ALLOC, FREE, GIVES, Alive, Course
from trainfit.explanation.snapshot.stacks import NOT_RECORDED, Known, Made, known_of, made_by, place
from trainfit.ledger.ledger import ALLOCATE, NO_LAYER, Event, Ledger, Op, Segment, Storage
from trainfit.ledger.ledger import FREE as FREED

LOADING = "loading"
MADE_BEFORE: dict[Made, str] = {
    "optimizer": "optimizer", "communication": "communication", "workspace": "workspace",
    "backward": "gradients",
}  # fmt: skip
"""What made memory that was alive when the history began -> its category; all else is weights."""
WORKSPACES = frozenset((32 << 20, 8_519_680, 1 << 20))
"""Bytes of cuBLAS's and cuBLASLt's workspaces: on Hopper, on other GPUs, and before torch 2.7."""
PHASE_OF: dict[Made, str] = {"activations": "forward", "backward": "backward", "optimizer": "optimizer"}
NEXT_PHASE = {"forward": ("backward",), "backward": ("optimizer", "forward")}
"""A phase -> the phases up to which its result lives; of others any other phase."""
RESULT_OF = {"forward": "activations", "backward": "gradients", "optimizer": "optimizer", LOADING: "weights"}


class Stretch(NamedTuple):
    """Events of one phase, one after another."""

    begin: int
    phase: str


class _Stacks:
    """What each stack says, found once."""

    def __init__(self, snapshot: Snapshot):
        self._snapshot = snapshot
        self._made: dict[int, Made] = {}
        self._places: dict[int, str] = {}
        self._known: dict[int, Known | None] = {}

    def known(self, index: int) -> Known | None:
        """Return what an exported ledger says of a stack."""
        if index not in self._known:
            self._known[index] = known_of(self._snapshot.stack(index))
        return self._known[index]

    def phase(self, index: int) -> str | None:
        """Return the phase that a stack tells of; None: any."""
        known = self.known(index)
        if known is not None:
            return LOADING if known.phase == "init" else known.phase or None
        return PHASE_OF.get(self.made(index))

    def made(self, index: int) -> Made:
        found = self._made.get(index)
        if found is None:
            found = self._made[index] = made_by(self._snapshot.stack(index))
        return found

    def place(self, index: int) -> str:
        found = self._places.get(index)
        if found is None:
            found = self._places[index] = place(self._snapshot.stack(index))
        return found


def ledger_of_snapshot(snapshot: Snapshot, device: int, course: Course) -> Ledger:
    """Return what one device's allocator did as a ledger.

    Segments are named first and steady; the first ends with the first update of an optimizer, if the history
    has what came before it. Where a request failed, the ledger ends with the last one that did: what the
    exception freed says nothing about the step.
    """
    events, stacks = snapshot.events[device], _Stacks(snapshot)
    last = course.last
    stretches = _stretches(events, stacks)
    ledger = Ledger(segments=[Segment("init", "init"), *_segments(stretches, is_whole=not course.initial)])
    op_of_place: dict[tuple[str, int], int] = {}
    alive: dict[int, int] = {}
    """Address -> index of the storage."""
    begins, boundaries = [one.begin for one in stretches], _boundaries(stretches)

    def op_of(stack: int, segment: int) -> int:
        place = NOT_RECORDED if segment == 0 and stack == NO_STACK else stacks.place(stack)
        if (place, segment) not in op_of_place:
            op_of_place[place, segment] = len(ledger.ops)
            ledger.ops.append(Op("", place, segment, NO_LAYER, 0.0, 0.0, 0.0, 0.0, 0, ""))
        return op_of_place[place, segment]

    def allocate(one: Alive, segment: int, category: str) -> None:
        alive[one.address] = len(ledger.storages)
        ledger.events.append(Event(ALLOCATE, len(ledger.storages), NO_LAYER, segment))
        op = op_of(one.stack, segment)
        ledger.storages.append(Storage(one.num_bytes, category, NO_LAYER, op, "//", one.stream))

    ends, kept, emptied_at = _ends(events), set[tuple[str, int]](), set[int]()
    for one in course.initial:
        made = stacks.made(one.stack) if one.stack != NO_STACK else "weights"
        allocate(one, 0, MADE_BEFORE.get(made, "weights"))
    for index, (action, address, size, stream) in enumerate(islice(events.rows(), last)):
        if action in GIVES:
            emptied_at.add(len(ledger.events))
        if action not in (ALLOC, FREE):
            continue
        at = bisect_right(begins, index) - 1
        if action == FREE:
            storage = alive.pop(address, None)
            if storage is not None:
                ledger.events.append(Event(FREED, storage, NO_LAYER, at + 1))
            continue
        stack, end = events.stacks[index], ends.get(index, last)
        phase = stretches[at].phase
        if (known := stacks.known(stack)) is not None:
            allocate(Alive(address, size, stream, stack), at + 1, known.category)
            continue
        category = _category(stacks.made(stack), phase, boundaries[at], end if end < last else None)
        outlives = end >= last and at + 1 < len(stretches) and phase != LOADING
        if outlives and size in WORKSPACES and (phase, size) not in kept:
            kept.add((phase, size))  # The first of its size that is never freed: a library keeps it.
            category = "workspace"
        allocate(Alive(address, size, stream, stack), at + 1, category)
    ledger.emptied_at = tuple(sorted(emptied_at))
    return ledger


def _stretches(events: Events, stacks: _Stacks) -> list[Stretch]:
    """Return the phases in order; what says nothing of itself belongs to the one before."""
    found = [Stretch(0, LOADING)]
    for index, (action, stack) in enumerate(zip(events.actions, events.stacks, strict=True)):
        if action != ALLOC:
            continue
        phase = stacks.phase(stack)
        if phase is None or phase == found[-1].phase:
            continue
        if phase == "backward" and found[-1].phase == LOADING:
            continue  # A stack without Python frames, before there was a forward.
        found.append(Stretch(index, phase))
    return found


def _segments(stretches: list[Stretch], *, is_whole: bool) -> list[Segment]:
    """Name each phase's step."""
    found: list[Segment] = []
    step = "first" if is_whole else "steady"
    for one, after in pairwise([*stretches, Stretch(-1, "")]):
        found.append(Segment(step, one.phase))
        if one.phase == "optimizer" and after.phase != "optimizer":
            step = "steady"
    return found


def _ends(events: Events) -> dict[int, int]:
    """Return the index of the event that frees each allocation, by the index of its event."""
    owner: dict[int, int] = {}
    found: dict[int, int] = {}
    for index, (action, address, _, _) in enumerate(events.rows()):
        if action == ALLOC:
            owner[address] = index
        elif action == FREE and address in owner:
            found[owner.pop(address)] = index
    return found


def _boundaries(stretches: list[Stretch]) -> list[int | None]:
    """Return, for each stretch, the event up to which its results live; None: the history ends before."""
    following: dict[str, int] = {}
    """Phase -> where it begins next, among the stretches that were seen."""
    found: list[int | None] = []
    for one in reversed(stretches):
        wanted = NEXT_PHASE.get(one.phase) or [phase for phase in following if phase != one.phase]
        found.append(min((following[phase] for phase in wanted if phase in following), default=None))
        following[one.phase] = one.begin
    return found[::-1]


def _category(made: Made, phase: str, boundary: int | None, end: int | None) -> str:
    """Return the category of an allocation that is freed by event ``end``; None: never."""
    if made in ("communication", "workspace", "weights"):
        return made
    lives_on = end is None or (boundary is not None and end > boundary)
    return RESULT_OF[phase] if lives_on else "temporary"
