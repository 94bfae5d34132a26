"""The ledger: what one traced training run allocated, freed and computed, in order. No torch here.

Enters: the tracer's entries. Leaves: events to replay (``expand``) and operations to sum (``Op.times``).

A run of equal layers is traced with a few: the layers are cut into a first group (FIRST), one middle group (MIDDLE)
and a last group (LAST), and the middle group's entries stand for ``repeats`` copies of it. ``expand`` writes the copies
out; ``RepeatError`` says that the entries do not allow it, and the whole model must be traced. Most models are one run;
one whose layers are told to recompute differently has several, and run r's groups are numbered from 3 r.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

NO_LAYER, FIRST, MIDDLE, LAST = -1, 0, 1, 2
GROUPS_PER_RUN = 3
ALLOCATE, FREE = 1, 0


def part_of(group: int) -> int:
    """FIRST, MIDDLE or LAST of its run; NO_LAYER."""
    return group if group == NO_LAYER else group % GROUPS_PER_RUN


def run_of(group: int) -> int:
    """Number of the run that a group of layers belongs to; NO_LAYER where it is none."""
    return group if group == NO_LAYER else group // GROUPS_PER_RUN


class RepeatError(RuntimeError):
    """The traced groups do not correspond, so the middle one cannot stand for its copies."""


class Segment(NamedTuple):
    """A stretch of the run: ``step`` is init, first or steady; ``phase`` is init, forward, backward or optimizer."""

    step: str
    phase: str


class Storage(NamedTuple):
    """One allocation."""

    num_bytes: int
    category: str
    group: int
    """In which group of layers it was allocated (see ``part_of`` and ``run_of``), or NO_LAYER."""
    op: int
    """Index of the operation that allocated it; -1 for what no operation did (a library's workspace)."""
    path: str
    """Name that the same allocation has in every group of layers."""


class Op(NamedTuple):
    """One operation, as its CUDA kernel."""

    name: str
    module: str
    segment: int
    group: int
    flops: float
    """Matrix-product FLOPs it executes, attention as if nothing were masked."""
    causal_flops: float
    """The same without the attention scores that the kernel skips (``is_causal``); with those that a mask tensor hides."""
    model_flops: float
    """Of ``causal_flops``, what the mathematics needs: 0 for recomputed work, attention's recomputed scores and every pair that a mask hides out."""
    model_flops_full: float
    """The same of ``flops``."""
    num_bytes: int
    """Bytes read and written in device memory."""
    dtype: str
    """Dtype of the matrix product's inputs, else of the output."""
    calls: int = 1
    """0 for the shares of an operation over lists of several groups' tensors, all but one: it is issued once."""
    is_update: bool = False
    """An optimizer's, wherever it runs: in the backward too."""
    kernel: str = ""
    """Of attention: which kernel computes it, as catalog/attention.py names them."""
    head: int = 0
    """Of attention: the head size."""
    seq: int = 0
    """Of attention: queries of a sequence."""
    masked: bool = False
    """Of attention: a tensor is added to its scores."""


class Event(NamedTuple):
    """An allocation or a free, in order of time."""

    kind: int
    storage: int
    group: int
    segment: int


class LiveEvent(NamedTuple):
    """An event of the expanded ledger; ``key`` is unique among all allocations."""

    kind: int
    key: tuple[int, int]
    num_bytes: int
    category: str
    segment: int
    storage: int


@dataclass
class Ledger:
    """A traced run: init, the first step and the steady step, in segments."""

    segments: list[Segment] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    repeats: tuple[int, ...] = ()
    """For each run, how many groups of layers the middle one stands for. Empty: nothing was left out."""
    params: int = 0
    trainable_params: int = 0
    pinned: tuple[tuple[int, int], ...] = ()
    """Pieces of pinned host memory (``offload/copies.py``): bytes, and the group of layers that needs them."""
    ops_without_flops: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of the libraries that it was traced with, by name: torch, and those that the step uses."""
    empty_cache_every: int | None = None
    """After every so many steps the allocator's cache is given back."""

    @property
    def repeat(self) -> int:
        """The most groups that a middle one stands for (1: nothing was left out)."""
        return max(self.repeats, default=1)

    @property
    def host_bytes(self) -> int:
        """Pinned host memory that the whole model needs."""
        return sum(num_bytes * self._times(group) for num_bytes, group in self.pinned)

    def recomputes(self, op: Op) -> bool:
        """Whether it is a product of the forward that the backward runs again."""
        counts_for_nothing = bool(op.causal_flops) and not op.model_flops and not op.is_update
        return counts_for_nothing and self.segments[op.segment].phase == "backward"

    def times(self, op: Op) -> int:
        """How often an operation happens in the whole model."""
        return self._times(op.group)

    def _times(self, group: int) -> int:
        return self.repeats[run_of(group)] if part_of(group) == MIDDLE else 1

    def expand(self) -> Iterator[LiveEvent]:
        """All events of the whole model, the middle group's copies written out.

        Raises:
            RepeatError: an allocation would be freed twice, or never although its pattern is freed.
        """
        if not self.repeats:
            for event in self.events:
                s = self.storages[event.storage]
                yield LiveEvent(
                    event.kind, (event.storage, 1), s.num_bytes, s.category, event.segment, event.storage
                )
            return
        yield from _Expansion(self).events()


class _Expansion:
    """Writes out the copies 1..R of each middle group; the first group of its run is copy 0, the last one R + 1.

    A free names an allocation relative to where it happens: what group g frees of its neighbour g - 1, each copy
    frees of its own neighbour. ``path`` finds the same allocation in another group.
    """

    def __init__(self, ledger: Ledger):
        self.ledger, self.repeats = ledger, ledger.repeats
        self.twins = {s.path: i for i, s in enumerate(ledger.storages) if part_of(s.group) == MIDDLE}
        self.live: set[tuple[int, int]] = set()

    def events(self) -> Iterator[LiveEvent]:
        self._check_forwards()
        run: list[Event] = []
        before = NO_LAYER
        for event in self.ledger.events:
            if run and event.group != run[0].group:
                yield from self._run(run, before)
                before = run[0].group if run[0].group != NO_LAYER else before
                run = []
            run.append(event)
        yield from self._run(run, before)
        self._check_frees()

    def _run(self, run: list[Event], before: int) -> Iterator[LiveEvent]:
        group = run[0].group if run else NO_LAYER
        if part_of(group) == MIDDLE:
            copies = range(1, self.repeats[run_of(group)] + 1)
            # Layers are walked up in the forward, down in the backward.
            for copy in reversed(copies) if before == group + 1 else copies:
                for event in run:
                    yield from self._at(event, copy)
        else:
            for event in run:
                yield from self._at(event, self._end(group))

    def _end(self, group: int) -> int:
        """Number of the copy that a group is which stands for itself."""
        if group == NO_LAYER:
            return -1
        return 0 if part_of(group) == FIRST else self.repeats[run_of(group)] + 1

    def _at(self, event: Event, copy: int) -> Iterator[LiveEvent]:
        s = self.ledger.storages[event.storage]
        if event.kind == ALLOCATE:
            key = (event.storage, copy)
            self.live.add(key)
            yield LiveEvent(ALLOCATE, key, s.num_bytes, s.category, event.segment, event.storage)
            return
        for key in self._freed(event, s, copy):
            if key not in self.live:
                if part_of(event.group) == MIDDLE and s.group == NO_LAYER:
                    continue  # What no layer owns is freed once.
                raise RepeatError(f"{s.path} is freed twice")
            self.live.remove(key)
            owner = self.ledger.storages[key[0]]
            yield LiveEvent(FREE, key, owner.num_bytes, owner.category, event.segment, key[0])

    def _freed(self, event: Event, s: Storage, copy: int) -> list[tuple[int, int]]:
        index, frees_in, made_in = event.storage, part_of(event.group), part_of(s.group)
        if made_in != MIDDLE and (frees_in != MIDDLE or made_in == NO_LAYER):
            return [(index, self._end(s.group))]
        if event.group == NO_LAYER:
            return [(index, copy) for copy in range(1, self.repeats[run_of(s.group)] + 1)]
        if run_of(event.group) != run_of(s.group):
            raise RepeatError(f"{s.path} is freed in another run of layers")
        if event.group == s.group:
            return [(index, copy)]
        target, last = copy + (s.group - event.group), self.repeats[run_of(s.group)] + 1
        if 1 <= target < last:
            twin = index if made_in == MIDDLE else self.twins.get(s.path)
            if twin is None:
                raise RepeatError(f"{s.path} has no twin in the middle group")
            return [(twin, target)]
        # Beyond an end the neighbour is the first or the last group itself.
        return [(index, target)] if target in (0, last) else []

    def _check_forwards(self) -> None:
        """A run's groups must allocate the same in the forward: layers may differ by what no signature of them shows."""
        forwards = {i for i, segment in enumerate(self.ledger.segments) if segment.phase == "forward"}
        sizes: dict[int, dict[str, int]] = {group: {} for group in range(GROUPS_PER_RUN * len(self.repeats))}
        for s in self.ledger.storages:
            if (
                s.group in sizes
                and s.op >= 0
                and self.ledger.ops[s.op].segment in forwards
                and not _is_extra(s.path)
            ):
                sizes[s.group][s.path] = s.num_bytes
        for other in sizes:
            middle = sizes[other - part_of(other) + MIDDLE]
            if sizes[other] != middle:
                path = min(path for path, _ in sizes[other].items() ^ middle.items())
                raise RepeatError(f"{path} is not the same in every group")

    def _check_frees(self) -> None:
        freed = {event.storage for event in self.ledger.events if event.kind == FREE}
        for index, copy in self.live:
            if index in freed:
                raise RepeatError(f"{self.ledger.storages[index].path} is never freed in copy {copy}")


def _is_extra(path: str) -> bool:
    """Of a layer before or after those that repeat (``places.Groups`` names them)."""
    return ".lead" in path or ".tail" in path
