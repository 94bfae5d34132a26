"""The ledger: allocations, frees and operations of one traced training run, in order. No torch here.

A run of identical layers is traced with a few of them: a first group (FIRST), one middle group (MIDDLE) and a
last group (LAST). The middle group's entries stand for ``repeats`` copies, which ``expand`` writes out. Most
models have one run. A model whose layers recompute differently has several; run r's groups are numbered from
3 r.
"""

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from trainfit.catalog.collectives import CollectiveKind, collective_kinds

NO_LAYER, FIRST, MIDDLE, LAST = -1, 0, 1, 2
GROUPS_PER_RUN = 3
ALLOCATE, FREE = 1, 0
RECORDED = "capture"
"""Phase in which a CUDA graph is recorded, which begins by emptying the cache (torch.cuda.graph)."""


def part_of(group: int) -> int:
    """Return FIRST, MIDDLE or LAST for a group of layers; NO_LAYER for none."""
    return group if group == NO_LAYER else group % GROUPS_PER_RUN


def run_of(group: int) -> int:
    """Return the number of the run that a group of layers belongs to; NO_LAYER for none."""
    return group if group == NO_LAYER else group // GROUPS_PER_RUN


PROGRAM = "program/"
"""Beginning of the paths of what slices of a compiled program allocate (see ``slice_path``)."""


def slice_path(number: int, position: int) -> str:
    """Return the path of what a kernel of a slice of a compiled program allocates.

    Args:
        number: FIRST, MIDDLE, LAST; less or more before or after these, in the order of the layers.
        position: of the kernel in its slice.
    """
    return f"{PROGRAM}{'in' if FIRST <= number <= LAST else number}/{position}"


class RepeatError(RuntimeError):
    """The traced groups of layers differ, so the middle one cannot stand for copies."""


class Segment(NamedTuple):
    """A step (init, first, steady) and its phase (init, data, forward, backward, optimizer)."""

    step: str
    phase: str


class Storage(NamedTuple):
    """One allocation."""

    num_bytes: int
    category: str
    group: int
    """Group of layers in which it was allocated (see ``part_of`` and ``run_of``), or NO_LAYER."""
    op: int
    """Index of the operation that allocated it; -1 for a library's workspace."""
    path: str
    """Segment, module path within the group, operation and count: the same in each group of layers."""
    stream: int = 0
    """Number of the CUDA stream that allocated it; each has its own pools of blocks."""

    @property
    def slice(self) -> int | None:
        """Number of the slice of a compiled program that allocated it (see ``slice_path``)."""
        _, _, path = self.path.partition("/")
        if not path.startswith(PROGRAM):
            return None
        number = path.split("/")[1]
        return part_of(self.group) if number == "in" else int(number)

    @property
    def twin_path(self) -> str:
        """The path of the same allocation in the middle slice."""
        segment, _, rest = self.path.split("/", 2)
        return f"{segment}/{PROGRAM}in/{rest.partition('/')[2]}"


class Op(NamedTuple):
    """One operation, as its CUDA kernel."""

    name: str
    module: str
    segment: int
    group: int
    flops: float
    """Executed matrix-product FLOPs, attention counted without a mask."""
    causal_flops: float
    """``flops`` without the attention scores that the kernel skips (``is_causal``); a mask tensor skips
    none."""
    model_flops: float
    """``causal_flops`` without recomputation, recomputed attention scores and pairs that a mask hides."""
    model_flops_full: float
    """``flops`` without recomputation and recomputed attention scores."""
    num_bytes: int
    """Bytes read and written in device memory."""
    dtype: str
    """Dtype of the matrix product's inputs, else of the output."""
    calls: int = 1
    """Kernel launches. An operation on lists of several groups' tensors has an entry a group; all but one are
    0."""
    is_update: bool = False
    """Part of an optimizer's update, also one in the backward."""
    kernel: str = ""
    """Attention: the kernel, as catalog/attention.py names it."""
    head: int = 0
    """Attention: the head size."""
    seq: int = 0
    """Attention: queries per sequence."""
    masked: bool = False
    """Attention: a mask or bias tensor is added to the scores."""
    shape: tuple[int, ...] = ()
    """Matrix product: batch, m, n, k."""
    layout: str = ""
    """How tensors lie in memory, where it decides the speed (virtual/cuda/op_layout.py)."""
    host: tuple[int, int, int, int] = (0, 0, 0, 0)
    """What the host ran since the entry before: views, module calls, compiled graphs, and reads of a value,
    for each of which it waits until the device has computed it. Before an entry that runs once for all
    layers, the views are those of all layers."""
    wrapped: tuple[int, int] = (0, 0)
    """Operations on DTensors or other subclasses of tensors since the entry before, and their tensors."""
    in_mode: int = 0
    """Calls since the entry before, this one and views included, that passed through a dispatch mode in
    Python: selective recomputation's."""
    python: int = 0
    """Python functions that a traced script called since the entry before; 0 in a recipe's ledger."""


class Collective(NamedTuple):
    """One collective operation of this rank."""

    name: str
    """A row of catalog/collectives.toml, such as ``all_gather``."""
    segment: int
    group: int
    """Group of layers, as of an operation."""
    op: int
    """Index of the operation before it."""
    num_bytes: int
    """Bytes of the whole tensor: what an all-gather makes, or a reduction or an all-to-all takes."""
    num_ranks: int
    span: int
    """Distance from the group's first to its last rank, plus one: above the GPUs of a host it leaves it."""
    is_synchronous: bool = False
    """The computation waits for it, as between the parts of a tensor-parallel block."""
    begins_after: int = -1
    """On a stream of its own: index of the operation that must be done before it begins; -1: ``op``."""
    waited_at: int = -1
    """Index of the operation after which the computation waits for it; -1: at once, or in a backward at its
    end."""
    num_parameters: int = 0
    """Parameters that FSDP2 gathers or reduces with it; 0: another's."""

    @property
    def kind(self) -> CollectiveKind:
        """What passes through links."""
        return collective_kinds()[self.name]


class Event(NamedTuple):
    """An allocation or a free."""

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
    """A traced run: initialization, the first step and the steady step, in segments."""

    segments: list[Segment] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    repeats: tuple[int, ...] = ()
    """For each run of layers, how many groups the middle one stands for. Empty: the whole model was
    traced."""
    traced_whole: str = ""
    """Why every layer was traced; empty where layers are repeated, or the caller requested it."""
    params: int = 0
    trainable_params: int = 0
    active_params: int = 0
    """Parameters that one token meets: of a mixture, without the experts not chosen."""
    pinned: tuple[tuple[int, int], ...] = ()
    """Buffers of pinned host memory (``offload/copies.py``): bytes, and the group of layers that owns
    them."""
    ops_without_flops: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    """Conditions under which a real step takes other time or memory, shown with the answer."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of the libraries that the step uses, by name."""
    empty_cache_every: int | None = None
    """Steps between two calls of ``torch.cuda.empty_cache``."""
    emptied_at: tuple[int, ...] = ()
    """Numbers of events before which a script, or a recorded run, emptied the cache. No layer is repeated."""
    peer_bytes: int = 0
    """Device memory outside the allocator that other ranks read and write."""
    held: list[tuple[int, int]] = field(default_factory=list)
    """Storages that another thread may hold longer: index, and after how many events it frees them then."""
    compiled: tuple[int, int] = (0, 0)
    """Graphs that torch.compile compiles, and kernels and library calls of their programs, of all layers."""
    optional: list[int] = field(default_factory=list)
    """Storages that another run of the same step may do without."""
    expanded: list[LiveEvent] | None = field(default=None, init=False, repr=False, compare=False)
    """What ``expand`` returned."""
    kept_in: str = field(default="", init=False, repr=False, compare=False)
    """Name of the file that this ledger is kept in; empty: it is not kept, or was changed since."""

    def with_lower_peak(self) -> "Ledger":
        """Return the ledger without its ``optional`` storages; itself if there are none."""
        if not self.optional:
            return self
        dropped = set(self.optional)
        kept = [number for number, one in enumerate(self.events) if one.storage not in dropped]
        emptied_at = tuple(bisect_left(kept, number) for number in self.emptied_at)
        return replace(
            self, events=[self.events[number] for number in kept], optional=[], emptied_at=emptied_at
        )

    def with_higher_peak(self) -> "Ledger | None":
        """Return the ledger with its ``optional`` storages, and the frees of ``held`` at their latest.

        None: it has neither.
        """
        if not self.held:
            return self if self.optional else None
        held, last = {storage for storage, _ in self.held}, len(self.events)
        frees = {one.storage: one for one in self.events if one.kind == FREE and one.storage in held}
        later: dict[int, list[Event]] = {}
        for storage, number in self.held:
            if storage in frees:
                segment = self.events[min(number, last - 1)].segment
                later.setdefault(number, []).append(frees[storage]._replace(segment=segment))
        events = list[Event]()
        for number, event in enumerate(self.events):
            events += later.get(number, ())
            if event is not frees.get(event.storage):
                events.append(event)
        return replace(self, events=[*events, *later.get(last, ())], held=[])

    @property
    def repeat(self) -> int:
        """The most groups that a middle one stands for (1: the whole model was traced)."""
        return max(self.repeats, default=1)

    @property
    def host_bytes(self) -> int:
        """Pinned host memory of the whole model."""
        return sum(num_bytes * self.times_of_group(group) for num_bytes, group in self.pinned)

    @property
    def steady_ops(self) -> list[Op]:
        """Operations of the steady step, as traced."""
        steady = {number for number, segment in enumerate(self.segments) if segment.step == "steady"}
        return [op for op in self.ops if op.segment in steady]

    def steady_sum(self, quantity: str) -> float:
        """Return the sum of a field of the steady step's operations over the whole model."""
        return float(sum(self.times(op) * getattr(op, quantity) for op in self.steady_ops))

    def recomputes(self, op: Op) -> bool:
        """Return whether an operation is a matrix product of the forward, recomputed in the backward."""
        has_no_model_flops = bool(op.causal_flops) and not op.model_flops and not op.is_update
        return has_no_model_flops and self.segments[op.segment].phase == "backward"

    def times(self, op: Op | Collective) -> int:
        """Return how often an operation runs in the whole model."""
        return self.times_of_group(op.group)

    def times_of_group(self, group: int) -> int:
        """Return the number of groups in the whole model that a traced group stands for."""
        return self.repeats[run_of(group)] if part_of(group) == MIDDLE else 1

    def expand(self) -> list[LiveEvent]:
        """Return the events of the whole model, the middle group's copies written out, of a finished trace.

        Raises:
            RepeatError: an allocation would be freed twice, or never although the traced one is freed.
        """
        if self.expanded is None:
            self.expanded = _Expansion(self).events() if self.repeats else self._written_out()
        return self.expanded

    def _written_out(self) -> list[LiveEvent]:
        found: list[LiveEvent] = []
        for kind, index, _, segment in self.events:
            s = self.storages[index]
            found.append(LiveEvent(kind, (index, 1), s.num_bytes, s.category, segment, index))
        return found


class _Expansion:
    """Writes out copies 1..R of each middle group; the first group of its run is copy 0, the last one R + 1.

    A free in group g of an allocation in group g - 1 becomes, in each copy, a free of the preceding copy's
    allocation. ``path`` identifies the same allocation in another group.

    Temporary tensors of a block's constructor (GPT-J's position tables) have no group, so all copies' weights
    come before those of later layers: the small pool may end initialization with a segment more.
    """

    def __init__(self, ledger: Ledger):
        self.ledger, self.repeats = ledger, ledger.repeats
        self.twins = {s.path: i for i, s in enumerate(ledger.storages) if part_of(s.group) == MIDDLE}
        self.live: set[tuple[int, int]] = set()
        self.slice_of = [s.slice for s in ledger.storages]
        self.slices = {
            (number, ledger.storages[i].twin_path): i
            for i, number in enumerate(self.slice_of)
            if number is not None
        }
        self.nearest = NO_LAYER, LAST
        """Segment, and its last group of layers so far."""
        self.at_end: set[str] = set()
        """Paths of a compiled program's middle slice that were freed with the model's ends, in one copy."""

    def events(self) -> list[LiveEvent]:
        self._check_forwards()
        found: list[LiveEvent] = []
        run: list[Event] = []
        before = NO_LAYER
        for event in self.ledger.events:
            if run and event.group != run[0].group:
                self._run(run, before, found)
                before = run[0].group if run[0].group != NO_LAYER else before
                run = []
            run.append(event)
        self._run(run, before, found)
        self._check_frees()
        return found

    def _run(self, run: list[Event], before: int, found: list[LiveEvent]) -> None:
        """Append the copies of events of one group."""
        group = run[0].group if run else NO_LAYER
        copies = range(self._end(group), self._end(group) + 1)
        segment = run[0].segment if run else NO_LAYER
        if group != NO_LAYER or segment != self.nearest[0]:
            self.nearest = segment, LAST if group == NO_LAYER else part_of(group)
        if part_of(group) == MIDDLE:
            copies = range(1, self.repeats[run_of(group)] + 1)
            if before == group + 1:  # The backward visits layers in reverse.
                copies = copies[::-1]
        stored = [(event, self.ledger.storages[event.storage]) for event in run]
        for copy in copies:
            for event, s in stored:
                if event.kind == ALLOCATE:
                    key = (event.storage, copy)
                    self.live.add(key)
                    found.append(
                        LiveEvent(ALLOCATE, key, s.num_bytes, s.category, event.segment, event.storage)
                    )
                else:
                    self._free(event, s, copy, found)

    def _end(self, group: int) -> int:
        """Return the copy number of a group that is no middle group."""
        if group == NO_LAYER:
            return -1
        return 0 if part_of(group) == FIRST else self.repeats[run_of(group)] + 1

    def _free(self, event: Event, s: Storage, copy: int, found: list[LiveEvent]) -> None:
        for key in self._freed(event, s, copy):
            if key not in self.live:
                if part_of(event.group) == MIDDLE and s.group == NO_LAYER:
                    continue  # An allocation outside the layers is freed once.
                raise RepeatError(f"{s.path} is freed twice")
            self.live.remove(key)
            owner = self.ledger.storages[key[0]]
            found.append(LiveEvent(FREE, key, owner.num_bytes, owner.category, event.segment, key[0]))

    def _freed(self, event: Event, s: Storage, copy: int) -> list[tuple[int, int]]:
        """Return the storages, with the number of their copy, that a free stands for in a copy of its group.

        An example: five layers are traced as three, so ``repeats`` is 3. FIRST is copy 0, MIDDLE stands for
        copies 1 to 3, LAST is copy 4. Each layer allocates an activation, and the layer after it frees that.
        The activations are storages 0, 1 and 2, with one path in all three groups. The traced events are::

            FIRST   allocate 0
            MIDDLE  allocate 1, free 0
            LAST    allocate 2, free 1

        A free in MIDDLE of a storage of FIRST reaches one group back. In copy 1 its target is copy 0, the
        first group itself: (0, 0). In copy 2 its target is copy 1, a copy of the middle group, where the
        storage of the same path is 1: (1, 1). In copy 3 it is (1, 2). The free in LAST, copy 4, reaches
        copy 3: (1, 3). So the five layers run as::

            +(0, 0)  +(1, 1) -(0, 0)  +(1, 2) -(1, 1)  +(1, 3) -(1, 2)  +(2, 4) -(1, 3)
        """
        number = self.slice_of[event.storage]
        if number is not None:
            return self._freed_of_slice(event, s, number, copy)
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
        # The neighbour of an outermost copy is the first or the last group.
        return [(index, target)] if target in (0, last) else []

    def _freed_of_slice(self, event: Event, s: Storage, number: int, copy: int) -> list[tuple[int, int]]:
        """Return what an event frees in a copy: the storage of the slice at the traced distance.

        The slices of a compiled program are equal kernel by kernel, so the twin of a storage in any slice has
        its position there. An example: three slices stand for five layers, ``last`` is 4. In the backward
        each layer makes a gradient, storages 0, 1 and 2, and the layer before it frees that::

            LAST    allocate 2
            MIDDLE  allocate 1, free 2
            FIRST   allocate 0, free 1

        The free in MIDDLE is of slice 2, one further than its own: the target of copy c is c + 1. Copies
        run in reverse. In copy 3 the target is 4, the last slice: (2, 4). In copies 2 and 1 it is a copy of
        the middle slice: (1, 3), (1, 2). The free in FIRST, copy 0, is of slice 1: (1, 1).
        """
        last = self.repeats[0] + 1
        if self.ledger.segments[event.segment].phase not in ("forward", "backward"):
            # Gradients are freed with no allocation between them: which first is no matter.
            if part_of(event.group) == MIDDLE and copy > 1:
                return []
            if number == MIDDLE:
                return [(event.storage, each) for each in range(1, last)]
            freed = [(event.storage, self._end(s.group))]
            if s.path in self.at_end:  # The other copies, as this slice, outlive the backward.
                twin = self.slices[MIDDLE, s.twin_path]
                freed += [(twin, each) for each in range(1, last) if (twin, each) in self.live]
            return freed
        if event.group == NO_LAYER:
            if number != MIDDLE:
                return [(event.storage, self._end(s.group))]
            # Kernels at the model's ends free what the nearest layer allocated.
            self.at_end.add(s.path)
            return [(event.storage, last - 1 if self.nearest[1] == LAST else 1)]
        target = copy + number - part_of(event.group)
        place = target if target <= 0 else MIDDLE if target < last else target - last + LAST
        if (place, s.twin_path) not in self.slices:
            raise RepeatError(f"{s.path} has no twin in the layers")
        return [(self.slices[place, s.twin_path], target if 0 <= target <= last else -1)]

    def _check_forwards(self) -> None:
        """Check that a run's groups allocate the same in the forward: equal signatures do not ensure it."""
        forwards = {i for i, segment in enumerate(self.ledger.segments) if segment.phase == "forward"}
        sizes: dict[int, dict[str, int]] = {group: {} for group in range(GROUPS_PER_RUN * len(self.repeats))}
        for s in self.ledger.storages:
            in_forward = s.op >= 0 and self.ledger.ops[s.op].segment in forwards
            # Layers before or after those that repeat (see ``scope.LayerGroups``) are no copies.
            if in_forward and s.group in sizes and not (".lead" in s.path or ".tail" in s.path):
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
