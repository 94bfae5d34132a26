"""Replay a ledger on the caching allocator: peaks by phase and what was alive at the highest. No torch here."""

from dataclasses import dataclass, field

from trainfit.ledger.allocator import CachingAllocator
from trainfit.ledger.ledger import ALLOCATE, Ledger, LiveEvent
from trainfit.spec.result import CATEGORIES, MemoryBreakdown, PhasePeaks, Phases

MIN_BLOCK = 512
"""Every allocation is rounded up to a multiple of it."""


@dataclass
class Replay:
    """Peaks of a replayed ledger, in bytes as ``torch.cuda.memory_stats`` counts them."""

    phases: Phases
    breakdown: MemoryBreakdown
    """At the steady or first peak, whichever is higher."""
    peak_phase: str
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    """Of the steps; with ``empty_cache_after_init``, what only building took is not in it."""
    init_reserved_bytes: int
    """The most that was reserved while the model and optimizer were built."""
    num_events: int
    peak_event: int
    """Index, among the ledger's expanded events, of the allocation that made the peak."""
    at_peak: list[tuple[int, int]] = field(default_factory=list)
    """Alive at the peak: (index of the storage, bytes), one entry an allocation."""


class UncachedAllocator:
    """Where nothing is cached (a CPU): live bytes, each allocation rounded to 512 as ``measure`` counts them."""

    def __init__(self) -> None:
        self.allocated_bytes = self.peak_reserved_bytes = self.num_retries = 0
        self._sizes: list[int] = []

    def malloc(self, num_bytes: int) -> int:
        self._sizes.append(-(-num_bytes // MIN_BLOCK) * MIN_BLOCK)
        self.allocated_bytes += self._sizes[-1]
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.allocated_bytes)
        return len(self._sizes) - 1

    def free(self, handle: int) -> None:
        self.allocated_bytes -= self._sizes[handle]

    def empty_cache(self) -> None:
        """Nothing is cached."""

    def reset_peaks(self) -> None:
        self.peak_reserved_bytes = self.allocated_bytes


def replay(
    ledger: Ledger,
    allocator: CachingAllocator | UncachedAllocator,
    *,
    empty_cache_after_init: bool = False,
    more_steps: int = 0,
) -> Replay:
    """Walk every allocation and free of the ledger through an allocator.

    Args:
        settled: give the cache back between building and the first step, and count reserved bytes from there, as
            ``measure`` does (``CudaMeter.settle``). Segments that only building needed would otherwise serve the steps,
            or lie idle: which decides 1 to 10 % of reserved bytes where logits are a large part.
        more_steps: run the steady step up to this many times more, until one neither takes a new segment nor gives the
            cache back: each that does leaves memory cut up differently, and a later one may find no room.
    Raises:
        OutOfMemory: the allocator's capacity does not hold it.
    """
    gpu = allocator
    events = list(ledger.expand())
    peaks = [0] * len(ledger.segments)
    handles: dict[tuple[int, int], int] = {}
    peak, peak_index, segment, after_init, init_reserved = -1, 0, -1, 0, 0
    malloc, free = gpu.malloc, gpu.free
    for index, event in enumerate(events):
        if event.segment != segment:
            left, begun = (ledger.segments[s].step if s >= 0 else "" for s in (segment, event.segment))
            if left == "first" != begun and ledger.empty_cache_every == 1:
                gpu.empty_cache()
            if left == "init":
                after_init, init_reserved = gpu.allocated_bytes, gpu.peak_reserved_bytes
                if empty_cache_after_init:
                    gpu.empty_cache()
                    gpu.reset_peaks()
            for passed in range(segment + 1, event.segment + 1):
                peaks[passed] = gpu.allocated_bytes
            segment = event.segment
        if event.kind == ALLOCATE:
            handles[event.key] = malloc(event.num_bytes)
            now = gpu.allocated_bytes
            if now > peaks[segment]:
                peaks[segment] = now
            if now > peak and ledger.segments[segment].step != "init":
                peak, peak_index = now, index
        else:
            free(handles.pop(event.key))
    if more_steps:
        _go_on(ledger, events, gpu, handles, more_steps)
    phases = _phases(ledger, peaks, after_init)
    alive = _alive_at(events, peak_index)
    return Replay(
        phases=phases,
        breakdown=_breakdown(alive, ledger, peak),
        peak_phase=".".join(ledger.segments[events[peak_index].segment]),
        peak_allocated_bytes=peak,
        peak_reserved_bytes=gpu.peak_reserved_bytes,
        init_reserved_bytes=init_reserved,
        num_events=len(events),
        peak_event=peak_index,
        at_peak=alive,
    )


def _go_on(
    ledger: Ledger,
    events: list[LiveEvent],
    gpu: CachingAllocator | UncachedAllocator,
    handles: dict[tuple[int, int], int],
    more_steps: int,
) -> None:
    """Run the steady step again, at most ``more_steps`` times, until one reserves no more and gives nothing back.

    A step that does not end as it began cannot be run again from its ledger: then no more are. Where the cache is
    emptied every so many steps, those between that change nothing are passed over, up to a step after it was emptied.

    Raises:
        OutOfMemory: one of them finds no room.
    """
    steady = [event for event in events if ledger.segments[event.segment].step == "steady"]
    left = _left_over(ledger, steady)
    number, emptied, every = 2, ledger.empty_cache_every == 1, ledger.empty_cache_every
    for _ in range(more_steps if left is not None else 0):
        if every is not None and number % every == 0:
            gpu.empty_cache()
            emptied = True
        number += 1
        before = gpu.num_retries, gpu.peak_reserved_bytes
        for taken, freed in left or ():
            handles[freed] = handles.pop(taken)
        for event in steady:
            if event.kind == ALLOCATE:
                handles[event.key] = gpu.malloc(event.num_bytes)
            else:
                gpu.free(handles.pop(event.key))
        if before == (gpu.num_retries, gpu.peak_reserved_bytes):
            if every is None or emptied:
                return
            number = -(-number // every) * every


def _left_over(
    ledger: Ledger, steady: list[LiveEvent]
) -> list[tuple[tuple[int, int], tuple[int, int]]] | None:
    """What a steady step leaves behind (its key), each with what it stands for of the step before (the key it frees).

    Some optimizers replace their state by new tensors; such a pair's names differ in the segment alone. None: the
    step frees something else than it leaves.
    """

    def named(keys: set[tuple[int, int]]) -> dict[tuple[str, int], tuple[int, int]]:
        return {(ledger.storages[key[0]].path.partition("/")[2], key[1]): key for key in keys}

    allocated = {event.key for event in steady if event.kind == ALLOCATE}
    freed = {event.key for event in steady if event.kind != ALLOCATE}
    taken, given = named(allocated - freed), named(freed - allocated)
    if taken.keys() != given.keys() or not len(taken) == len(allocated - freed) == len(freed - allocated):
        return None
    return [(key, given[name]) for name, key in taken.items()]


def _phases(ledger: Ledger, peaks: list[int], after_init: int) -> Phases:
    highest: dict[tuple[str, str], int] = {}
    for segment, peak in zip(ledger.segments, peaks, strict=True):
        highest[segment] = max(highest.get(segment, 0), peak)

    def of(step: str) -> PhasePeaks:
        return PhasePeaks(
            **{phase: highest.get((step, phase), 0) for phase in ("forward", "backward", "optimizer")}
        )

    return Phases(after_init=after_init, first=of("first"), steady=of("steady"))


def _alive_at(events: list, index: int) -> list[tuple[int, int]]:
    alive: dict[tuple[int, int], tuple[int, int]] = {}
    for event in events[: index + 1]:
        if event.kind == ALLOCATE:
            alive[event.key] = (event.storage, event.num_bytes)
        else:
            del alive[event.key]
    return list(alive.values())


def _breakdown(alive: list[tuple[int, int]], ledger: Ledger, peak: int) -> MemoryBreakdown:
    """Bytes by category; what blocks that are not split add is counted as temporary."""
    totals = dict.fromkeys(CATEGORIES, 0)
    for index, num_bytes in alive:
        totals[ledger.storages[index].category] += -(-num_bytes // MIN_BLOCK) * MIN_BLOCK
    totals["temporary"] += peak - sum(totals.values())
    return MemoryBreakdown(**totals)
