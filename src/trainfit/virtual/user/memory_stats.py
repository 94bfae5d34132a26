"""What ``torch.cuda.memory_allocated()`` and its kin answer while a person's code runs: the ledger so far, replayed."""

from trainfit.ledger.allocator import CachingAllocator
from trainfit.ledger.ledger import ALLOCATE
from trainfit.virtual.trace.tracer import Tracer


class MemoryStats:
    """The caching allocator, brought up to date whenever it is asked.

    Attributes:
        emptied_at: numbers of events before which the code gave the cache back (``torch.cuda.empty_cache``).
    """

    def __init__(self, tracer: Tracer, capacity_bytes: int):
        self._tracer, self.capacity_bytes = tracer, capacity_bytes
        self._allocator = CachingAllocator()
        self._handles: dict[int, int] = {}
        self._num_seen = 0
        self.emptied_at: set[int] = set()

    def now(self) -> CachingAllocator:
        """The allocator as it stands now."""
        ledger = self._tracer.ledger
        for event in ledger.events[self._num_seen :]:
            if event.kind == ALLOCATE:
                self._handles[event.storage] = self._allocator.malloc(
                    ledger.storages[event.storage].num_bytes
                )
            else:
                self._allocator.free(self._handles.pop(event.storage))
        self._num_seen = len(ledger.events)
        return self._allocator

    def empty_cache(self) -> None:
        """Give cached segments back, here and when the ledger is replayed."""
        self.now().empty_cache()
        self.emptied_at.add(self._num_seen)


class EmptyCacheAllocator(CachingAllocator):
    """A caching allocator whose cache is given back before the calls (malloc and free) of these numbers."""

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
