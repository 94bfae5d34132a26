"""Replay a ledger through the caching allocator: peaks by phase, live allocations at the peak. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from trainfit.ledger.allocator import CachingAllocator
from trainfit.ledger.ledger import ALLOCATE, RECORDED, Ledger, LiveEvent
from trainfit.ledger.segments import rounded
from trainfit.spec.result import CATEGORIES, PHASES, MemoryBreakdown, PhasePeaks, Phases


@dataclass
class Peaks:
    """Peaks of a replayed ledger, in bytes as ``torch.cuda.memory_stats`` counts them."""

    phases: Phases
    breakdown: MemoryBreakdown
    """At the highest peak of the first and the steady step."""
    peak_phase: str
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    """Of the steps; without those of initialization if ``empty_cache_after_init``."""
    init_reserved_bytes: int
    """Peak reserved bytes of initialization."""


@dataclass
class Replay(Peaks):
    """A replayed ledger: its peaks, what is alive at the highest one, and the peaks of each segment."""

    peak_event: int
    """Index, among the ledger's expanded events, of the allocation at the peak."""
    at_peak: list[tuple[int, int]]
    """Live allocations at the peak: (index of the storage, bytes)."""
    segment_peaks: list[int]
    """Highest allocated bytes of each segment."""
    segment_reserved: list[int]
    """Highest reserved bytes of each segment; where the cache is emptied within one, those at its end."""


class UncachedAllocator:
    """Allocator without a cache, for CPUs: live bytes, each rounded to 512 as ``measure`` does."""

    def __init__(self) -> None:
        self.allocated_bytes = self.peak_reserved_bytes = self.num_retries = 0
        self._sizes: list[int] = []

    @property
    def reserved_bytes(self) -> int:
        return self.allocated_bytes

    def malloc(self, num_bytes: int, stream: int = 0) -> int:
        self._sizes.append(rounded(num_bytes))
        self.allocated_bytes += self._sizes[-1]
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.allocated_bytes)
        return len(self._sizes) - 1

    def free(self, handle: int) -> None:
        self.allocated_bytes -= self._sizes[handle]

    def empty_cache(self) -> None:
        """Do nothing: there is no cache."""

    def reset_peaks(self) -> None:
        self.peak_reserved_bytes = self.allocated_bytes


def replay(
    ledger: Ledger,
    allocator: CachingAllocator | UncachedAllocator,
    *,
    empty_cache_after_init: bool = False,
    more_steps: int = 0,
) -> Replay:
    """Run every allocation and free of the ledger through an allocator.

    Args:
        empty_cache_after_init: empty the cache before the first step and count reserved bytes from there, as
            ``measure`` does (``CudaMeter.settle``).
        more_steps: repeat the steady step up to this often, until one neither allocates a segment nor empties
            the cache. Each that does changes the fragmentation, and a later one may find no room.
    Raises:
        OutOfMemory: the allocator's capacity is exceeded.
    """
    gpu, events = allocator, ledger.expand()
    streams = [storage.stream for storage in ledger.storages]
    peaks, reserved = [0] * len(ledger.segments), [0] * len(ledger.segments)
    handles: dict[tuple[int, int], int] = {}
    peak, peak_index, segment, after_init, init_reserved = -1, 0, -1, 0, 0
    malloc, free, emptied_at = gpu.malloc, gpu.free, frozenset(ledger.emptied_at)
    for index, (kind, key, num_bytes, _, event_segment, storage) in enumerate(events):
        if event_segment != segment:
            before, after = (ledger.segments[s].step if s >= 0 else "" for s in (segment, event_segment))
            if before == "first" != after and ledger.empty_cache_every == 1:
                gpu.empty_cache()
            if before in ("init", "setup"):
                after_init, init_reserved = gpu.allocated_bytes, gpu.peak_reserved_bytes
                if empty_cache_after_init:
                    gpu.empty_cache()
                    gpu.reset_peaks()
            reserved[segment] = gpu.reserved_bytes
            for number in range(segment + 1, event_segment + 1):
                peaks[number], reserved[number] = gpu.allocated_bytes, gpu.reserved_bytes
            segment = event_segment
            if ledger.segments[segment].phase == RECORDED:
                gpu.empty_cache()
        if index in emptied_at:
            gpu.empty_cache()
        if kind == ALLOCATE:
            handles[key] = malloc(num_bytes, streams[storage])
            now = gpu.allocated_bytes
            if now > peaks[segment]:
                peaks[segment] = now
            if now > peak and ledger.segments[segment].step != "init":
                peak, peak_index = now, index
        else:
            free(handles.pop(key))
    reserved[segment] = gpu.reserved_bytes
    for number in range(segment + 1, len(peaks)):
        peaks[number], reserved[number] = gpu.allocated_bytes, gpu.reserved_bytes
    if more_steps:
        _repeat_steady_step(ledger, events, gpu, handles, more_steps)
    alive = _alive_at(events, peak_index)
    return Replay(
        phases=_phases(ledger, peaks, after_init),
        breakdown=_breakdown(alive, ledger, peak),
        peak_phase=".".join(ledger.segments[events[peak_index].segment]),
        peak_allocated_bytes=peak,
        peak_reserved_bytes=gpu.peak_reserved_bytes,
        init_reserved_bytes=init_reserved,
        peak_event=peak_index,
        at_peak=alive,
        segment_peaks=peaks,
        segment_reserved=reserved,
    )


def _repeat_steady_step(
    ledger: Ledger,
    events: Sequence[LiveEvent],
    gpu: CachingAllocator | UncachedAllocator,
    handles: dict[tuple[int, int], int],
    more_steps: int,
) -> None:
    """Repeat the steady step until one leaves the reserved bytes and the cache as they were.

    A step that frees other allocations than it leaves cannot be repeated. With ``empty_cache_every``, steps
    that change nothing are skipped up to the next one after the cache was emptied.

    Raises:
        OutOfMemory: a step finds no room.
    """
    is_steady = [segment.step == "steady" for segment in ledger.segments]
    steady = [event for event in events if is_steady[event.segment]]
    streams = [storage.stream for storage in ledger.storages]
    replaced = _replaced_state(ledger, steady)
    number, emptied, every = 2, ledger.empty_cache_every == 1, ledger.empty_cache_every
    malloc, free = gpu.malloc, gpu.free
    if replaced is None:
        return
    for _ in range(more_steps):
        if every is not None and number % every == 0:
            gpu.empty_cache()
            emptied = True
        number += 1
        before = gpu.num_retries, gpu.peak_reserved_bytes
        for allocated, freed in replaced:
            handles[freed] = handles.pop(allocated)
        for kind, key, num_bytes, _, _, storage in steady:
            if kind == ALLOCATE:
                handles[key] = malloc(num_bytes, streams[storage])
            else:
                free(handles.pop(key))
        if before == (gpu.num_retries, gpu.peak_reserved_bytes):
            if every is None or emptied:
                return
            number = -(-number // every) * every


def _replaced_state(
    ledger: Ledger, steady: list[LiveEvent]
) -> list[tuple[tuple[int, int], tuple[int, int]]] | None:
    """Pair each allocation that a steady step leaves with the one of the step before that it frees, by key.

    Some optimizers replace their state by new tensors; the paths of such a pair differ in the segment alone.
    None: the step frees other allocations than it leaves.
    """

    def named(keys: set[tuple[int, int]]) -> dict[tuple[str, int], tuple[int, int]]:
        return {(ledger.storages[key[0]].path.partition("/")[2], key[1]): key for key in keys}

    allocated = {event.key for event in steady if event.kind == ALLOCATE}
    freed = {event.key for event in steady if event.kind != ALLOCATE}
    left, replaced = named(allocated - freed), named(freed - allocated)
    if left.keys() != replaced.keys() or not len(left) == len(allocated - freed) == len(freed - allocated):
        return None
    return [(key, replaced[name]) for name, key in left.items()]


def _phases(ledger: Ledger, peaks: list[int], after_init: int) -> Phases:
    def of(step: str) -> PhasePeaks:
        highest = dict.fromkeys(PHASES, 0)
        for segment, peak in zip(ledger.segments, peaks, strict=True):
            if segment.step == step and segment.phase in highest:
                highest[segment.phase] = max(highest[segment.phase], peak)
        return PhasePeaks(**highest)

    return Phases(after_init=after_init, first=of("first"), steady=of("steady"))


def _alive_at(events: Sequence[LiveEvent], index: int) -> list[tuple[int, int]]:
    alive: dict[tuple[int, int], tuple[int, int]] = {}
    for event in events[: index + 1]:
        if event.kind == ALLOCATE:
            alive[event.key] = (event.storage, event.num_bytes)
        else:
            del alive[event.key]
    return list(alive.values())


def _breakdown(alive: list[tuple[int, int]], ledger: Ledger, peak: int) -> MemoryBreakdown:
    """Return bytes by category; the unused ends of blocks that are not split count as temporary."""
    totals = dict.fromkeys(CATEGORIES, 0)
    for index, num_bytes in alive:
        totals[ledger.storages[index].category] += rounded(num_bytes)
    totals["temporary"] += peak - sum(totals.values())
    return MemoryBreakdown(**totals)
