"""Memory statistics (``torch.cuda.memory_allocated()``) in user code, from a replay of the ledger so far."""

from trainfit.ledger.allocator import CachingAllocator
from trainfit.ledger.ledger import ALLOCATE
from trainfit.virtual.trace.tracer import Tracer


class MemoryStats:
    """A caching allocator that replays new events on demand.

    ``emptied_at``: numbers of events before which the code called ``torch.cuda.empty_cache``.
    """

    def __init__(self, tracer: Tracer, capacity_bytes: int):
        self._tracer, self.capacity_bytes = tracer, capacity_bytes
        self._allocator = CachingAllocator()
        self._handles: dict[int, int] = {}
        self._num_seen = 0
        self.emptied_at: set[int] = set()

    def now(self) -> CachingAllocator:
        """Return the allocator after all events so far."""
        ledger = self._tracer.ledger
        for event in ledger.events[self._num_seen :]:
            if event.kind == ALLOCATE:
                storage = ledger.storages[event.storage]
                self._handles[event.storage] = self._allocator.malloc(storage.num_bytes, storage.stream)
            else:
                self._allocator.free(self._handles.pop(event.storage))
        self._num_seen = len(ledger.events)
        return self._allocator

    def empty_cache(self) -> None:
        """Release cached segments, here and when the ledger is replayed."""
        self.now().empty_cache()
        self.emptied_at.add(self._num_seen)


class EmptyCacheAllocator(CachingAllocator):
    """A caching allocator that empties its cache before the calls (malloc and free) of these numbers."""

    def __init__(self, emptied_at: set[int], capacity_bytes: int | None = None):
        super().__init__(capacity_bytes)
        self._emptied_at, self._num_calls = emptied_at, 0

    def malloc(self, num_bytes: int, stream: int = 0) -> int:
        self._count()
        return super().malloc(num_bytes, stream)

    def free(self, handle: int) -> None:
        self._count()
        super().free(handle)

    def _count(self) -> None:
        if self._num_calls in self._emptied_at:
            self.empty_cache()
        self._num_calls += 1
