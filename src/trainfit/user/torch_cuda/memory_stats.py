"""Memory statistics (``torch.cuda.memory_stats()``, snapshots) in user code, from a replay of the ledger so
far."""

import os
from collections import Counter, defaultdict
from typing import Any, NamedTuple

from trainfit.ledger.allocator import CachingAllocator
from trainfit.ledger.allocator_settings import allocator_settings
from trainfit.ledger.ledger import ALLOCATE
from trainfit.ledger.segments import Block
from trainfit.ledger.snapshot import frames_of, segments_of
from trainfit.user.tracer import UserTracer

POOLS = ("all", "large_pool", "small_pool")
METRICS = (
    "allocation allocated_bytes segment reserved_bytes active active_bytes inactive_split "
    "inactive_split_bytes requested_bytes"
).split()
UNUSED = ("oversize_allocations", "oversize_segments")
"""Statistics of settings that the allocator does not have."""
KINDS = ("current", "peak", "allocated", "freed")


class Change(NamedTuple):
    """One entry of a snapshot's history."""

    action: str  # alloc or free_completed
    address: int
    num_bytes: int
    stream: int
    storage: int


class MemoryStats:
    """A caching allocator that replays new events on demand.

    ``emptied_at``: numbers of events before which the code called ``torch.cuda.empty_cache``.
    """

    def __init__(self, tracer: UserTracer, capacity_bytes: int):
        self.tracer, self.capacity_bytes = tracer, capacity_bytes
        self.emptied_at: set[int] = set()
        self._allocator: CountingAllocator | None = None
        self._handles: dict[int, int] = {}
        self._num_seen = 0
        self._history: list[Change] | None = None

    def now(self) -> "CountingAllocator":
        """Return the allocator after all events so far."""
        if self._allocator is None:  # The code may change the settings until its first query.
            self._allocator = CountingAllocator(allocator_settings(os.environ).expandable_segments)
        ledger, allocator = self.tracer.ledger, self._allocator
        for event in ledger.events[self._num_seen :]:
            storage = ledger.storages[event.storage]
            if event.kind == ALLOCATE:
                handle = self._handles[event.storage] = allocator.malloc(storage.num_bytes, storage.stream)
                self._keep("alloc", handle, event.storage, storage.stream)
            else:
                handle = self._handles.pop(event.storage)
                self._keep("free_completed", handle, event.storage, storage.stream)
                allocator.free(handle)
        self._num_seen = len(ledger.events)
        return allocator

    def empty_cache(self) -> None:
        """Release cached segments, here and when the ledger is replayed."""
        self.now().empty_cache()
        self.emptied_at.add(self._num_seen)

    def record(self, enabled: bool, clear: bool = False) -> None:
        """Begin or end the history that a snapshot shows (``torch.cuda.memory._record_memory_history``)."""
        self.now()
        if not enabled or clear or self._history is None:
            self._history = [] if enabled else None

    def statistics(self) -> dict[str, Any]:
        """Return what ``torch.cuda.memory_stats_as_nested_dict`` returns."""
        allocator = self.now()
        counted = {metric: {pool: allocator.count(metric, pool) for pool in POOLS} for metric in METRICS}
        segments = counted["segment"]["all"]
        zero = dict.fromkeys(KINDS, 0)
        return {
            **counted,
            **{name: dict(zero) for name in UNUSED},
            "max_split_size": -1,
            "num_alloc_retries": 0,
            "num_ooms": 0,
            "num_sync_all_streams": allocator.num_emptied,
            "num_device_alloc": segments["allocated"],
            "num_device_free": segments["freed"],
            "num_oom_rejections": 0,
        }

    def snapshot(self) -> dict[str, Any]:
        """Return what ``torch.cuda.memory._snapshot`` returns; a frame names the module and the operation."""
        allocator, ledger = self.now(), self.tracer.ledger
        of_block = {
            id(allocator.block(handle)): storage for storage, handle in self._handles.items() if handle
        }
        segments = segments_of(allocator, of_block, ledger)
        traces = [
            {
                "action": change.action, "addr": change.address, "size": change.num_bytes,
                "stream": change.stream, "time_us": position, "pool_id": (0, 0),
                "frames": frames_of(ledger, change.storage),
            }
            for position, change in enumerate(self._history or ())
        ]  # fmt: skip
        return {
            "segments": segments,
            "device_traces": [traces],
            "allocator_settings": {},
            "external_annotations": [],
        }

    def _keep(self, action: str, handle: int, storage: int, stream: int) -> None:
        if self._history is not None and self._allocator is not None and handle:
            block = self._allocator.block(handle)
            self._history.append(Change(action, block.address, block.size, stream, storage))


class CountingAllocator(CachingAllocator):
    """A caching allocator that keeps the statistics of ``torch.cuda.memory_stats`` (DeviceStats)."""

    def __init__(self, expandable_segments: bool = False) -> None:
        super().__init__(expandable_segments=expandable_segments)
        self.num_emptied = 0
        self._counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        self._requested: dict[int, int] = {}
        self._unsplit_bytes: Counter[bool] = Counter()  # Wholly free segments, by whether they are small
        self._unsplit: Counter[bool] = Counter()

    def malloc(self, num_bytes: int, stream: int = 0) -> int:
        reserved = self.reserved_bytes
        handle = super().malloc(num_bytes, stream)
        if handle:
            block, new = self._blocks[handle], self.reserved_bytes - reserved
            after = block.after
            is_first = block.before is None and (
                after is None or (not after.allocated and after.after is None)
            )
            if is_first and not new and not block.expandable:
                self._unsplit[block.pool.small] -= 1
                self._unsplit_bytes[block.pool.small] -= block.size + (after.size if after else 0)
            self._requested[handle] = num_bytes
            self._changed(block, 1, num_bytes)
            if new:
                self._add("segment", block.pool.small, 1)
                self._add("reserved_bytes", block.pool.small, new)
            self._split(block.pool.small)
        return handle

    def free(self, handle: int) -> None:
        if not handle:
            return
        block = self._blocks[handle]
        self._changed(block, -1, self._requested.pop(handle))
        super().free(handle)
        if block.before is None and block.after is None and not block.expandable:
            self._unsplit[block.pool.small] += 1
            self._unsplit_bytes[block.pool.small] += block.size
        self._split(block.pool.small)

    def empty_cache(self) -> None:
        self.num_emptied += 1
        if self._expandable:
            reserved = self.reserved_bytes
            super().empty_cache()
            self._add("reserved_bytes", False, self.reserved_bytes - reserved)
            return
        for small in (False, True):
            self._add("segment", small, -self._unsplit[small])
            self._add("reserved_bytes", small, -self._unsplit_bytes[small])
        self._unsplit.clear()
        self._unsplit_bytes.clear()
        super().empty_cache()

    def reset_peaks(self) -> None:
        super().reset_peaks()
        for counts in self._counts.values():
            counts["peak"] = counts["current"]

    def reset_accumulated(self) -> None:
        """Set the historical totals to zero (``torch.cuda.reset_accumulated_memory_stats``)."""
        for counts in self._counts.values():
            counts["allocated"] = counts["freed"] = 0

    def count(self, metric: str, pool: str) -> dict[str, int]:
        """Return one statistic of one pool."""
        return {kind: self._counts[metric, pool][kind] for kind in KINDS}

    def _changed(self, block: Block, sign: int, requested: int) -> None:
        for metric, change in (
            ("allocation", 1), ("active", 1), ("allocated_bytes", block.size), ("active_bytes", block.size),
            ("requested_bytes", requested),
        ):  # fmt: skip
            self._add(metric, block.pool.small, sign * change)

    def _split(self, small: bool) -> None:
        """Count the free parts of segments that are in use."""
        pools = [pool for (is_small, _), pool in self._pools.items() if is_small == small]
        number = sum(len(pool.free) for pool in pools) - self._unsplit[small]
        name = POOLS[1 + small]
        used = self._counts["reserved_bytes", name]["current"] - self._counts["active_bytes", name]["current"]
        for metric, value in (
            ("inactive_split", number),
            ("inactive_split_bytes", used - self._unsplit_bytes[small]),
        ):
            self._add(metric, small, value - self._counts[metric, name]["current"])

    def _add(self, metric: str, small: bool, change: int) -> None:
        for pool in (POOLS[0], POOLS[1 + small]):
            counts = self._counts[metric, pool]
            counts["current"] += change
            counts["peak"] = max(counts["peak"], counts["current"])
            counts["allocated" if change > 0 else "freed"] += abs(change)
