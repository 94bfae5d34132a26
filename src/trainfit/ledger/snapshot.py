"""A replayed ledger in the form of ``torch.cuda.memory._snapshot()``. No torch here.

Frames, the innermost first, name what a ledger knows of an allocation: the operation, its module and the
modules around it, the step and phase, and last the category. Their file is ``<trainfit>``.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from trainfit.ledger.allocator import CachingAllocator
from trainfit.ledger.ledger import Ledger
from trainfit.ledger.replay import replay
from trainfit.ledger.segments import Block, Pool

FILE = "<trainfit>"
CATEGORY, PHASE = "category: ", "phase: "
"""What the names of the two outermost frames begin with."""
NO_CATEGORY = "unknown"
POOL_ID = (0, 0)
Frames = list[dict[str, Any]]


class Change(NamedTuple):
    """One entry of an allocator's history."""

    action: str  # As in a snapshot: alloc, free_requested, segment_alloc ...
    address: int
    num_bytes: int
    stream: int
    event: int
    """Number of the ledger's expanded event that caused it."""


class RecordingAllocator(CachingAllocator):
    """A caching allocator that records what it does, for one call of ``malloc`` or ``free`` an event."""

    def __init__(self, capacity_bytes: int | None = None, expandable_segments: bool = False):
        super().__init__(capacity_bytes, expandable_segments)
        self.history: list[Change] = []
        self.event_of: dict[int, int] = {}
        """Handle in use -> number of the event that allocated it."""
        self._requested: dict[int, tuple[int, int]] = {}
        self._num_calls = 0

    def malloc(self, num_bytes: int, stream: int = 0) -> int:
        handle = super().malloc(num_bytes, stream)
        if handle:
            block = self._blocks[handle]
            self.history.append(Change("alloc", block.address, num_bytes, stream, self._num_calls))
            self.event_of[handle], self._requested[handle] = self._num_calls, (num_bytes, stream)
        self._num_calls += 1
        return handle

    def free(self, handle: int) -> None:
        if handle:
            address, requested = self._blocks[handle].address, self._requested.pop(handle)
            for action in ("free_requested", "free_completed"):
                self.history.append(Change(action, address, *requested, self._num_calls))
            del self.event_of[handle]
        super().free(handle)
        self._num_calls += 1

    def _on_segment(self, action: str, pool: Pool, address: int, num_bytes: int) -> None:
        self.history.append(Change(action, address, num_bytes, pool.stream, self._num_calls))


def snapshot_of(ledger: Ledger, allocator: RecordingAllocator, *, empty_cache_after_init: bool) -> Any:
    """Replay a ledger and return what ``torch.cuda.memory._snapshot()`` would after its last step.

    Times are the numbers of the history's entries, in microseconds. Each entry has its ``category``, by which
    pytorch.org/memory_viz colors it.

    Args:
        allocator: a new one, set as for a prediction.
        empty_cache_after_init: as ``replay`` takes it.

    Raises:
        OutOfMemory: the allocator's capacity is exceeded.
    """
    replay(ledger, allocator, empty_cache_after_init=empty_cache_after_init)
    events = ledger.expand()
    known: dict[int, Frames] = {}

    def frames(event: int) -> Frames:
        storage = events[event].storage
        if storage not in known:
            known[storage] = frames_of(ledger, storage)
        return known[storage]

    entries: Frames = []
    for number, one in enumerate(allocator.history):
        of_segment = one.action.startswith("segment")
        category = NO_CATEGORY if of_segment else events[one.event].category
        entries.append(
            {
                "action": one.action, "addr": one.address, "size": one.num_bytes, "stream": one.stream,
                "time_us": number, "pool_id": POOL_ID, "compile_context": "N/A", "user_metadata": "",
                "frames": frames(one.event) if one.action == "alloc" else [], "category": category,
            }
        )  # fmt: skip
    blocks = {id(allocator.block(handle)): events[at].storage for handle, at in allocator.event_of.items()}
    return {
        "segments": segments_of(allocator, blocks, ledger),
        "device_traces": [entries],
        "allocator_settings": {"expandable_segments": any(b[0].expandable for b in allocator.segments())},
        "external_annotations": _annotations(ledger, allocator.history),
    }


def _annotations(ledger: Ledger, history: list[Change]) -> Frames:
    """Return the beginning and end of each phase, as the history's user annotations."""
    found: Frames = []
    events, before = ledger.expand(), -1
    last = len(history) - 1
    for number, one in enumerate(history):
        segment = events[min(one.event, len(events) - 1)].segment
        if segment == before:
            continue
        for stage, which, at in (("END", before, number), ("START", segment, number)):
            if which >= 0:
                found.append(_annotation(ledger, stage, which, at))
        before = segment
    return [*found, _annotation(ledger, "END", before, last)] if before >= 0 else found


def _annotation(ledger: Ledger, stage: str, segment: int, time_us: int) -> dict[str, Any]:
    name = ".".join(dict.fromkeys(ledger.segments[segment]))
    return {"stage": stage, "name": name, "device": 0, "time_us": time_us}


def frames_of(ledger: Ledger, index: int) -> Frames:
    """Return the frames of a storage: operation, modules, phase and category."""
    storage = ledger.storages[index]
    names: list[str] = []
    if storage.op >= 0:
        op = ledger.ops[storage.op]
        parts = op.module.split(".") if op.module else []
        names = [op.name, *(".".join(parts[:end]) for end in range(len(parts), 0, -1))]
        if op.segment < len(ledger.segments):
            names.append(PHASE + ".".join(dict.fromkeys(ledger.segments[op.segment])))
    names.append(CATEGORY + storage.category)
    return [{"filename": FILE, "line": 0, "name": name} for name in names]


def segments_of(
    allocator: CachingAllocator, storages: Mapping[int, int], ledger: Ledger
) -> list[dict[str, Any]]:
    """Return the allocator's segments as a snapshot has them.

    Args:
        storages: index of the storage by the ``id`` of its block.
    """
    return [_segment(blocks, storages, ledger) for blocks in allocator.segments()]


def _segment(blocks: list[Block], storages: Mapping[int, int], ledger: Ledger) -> dict[str, Any]:
    def requested(block: Block) -> int:
        index = storages.get(id(block))
        return 0 if index is None else ledger.storages[index].num_bytes

    used, pool = sum(block.size for block in blocks if block.allocated), blocks[0].pool
    return {
        "address": blocks[0].address, "total_size": sum(block.size for block in blocks),
        "stream": pool.stream, "device": 0, "segment_type": "small" if pool.small else "large",
        "segment_pool_id": POOL_ID, "allocated_size": used, "active_size": used,
        "requested_size": sum(map(requested, blocks)), "is_expandable": blocks[0].expandable, "frames": [],
        "blocks": [
            {
                "address": block.address, "size": block.size, "requested_size": requested(block),
                "state": "active_allocated" if block.allocated else "inactive",
                "frames": frames_of(ledger, storages[id(block)]) if id(block) in storages else [],
            }
            for block in blocks
        ],
    }  # fmt: skip
