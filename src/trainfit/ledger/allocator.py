"""Model of the CUDA caching allocator: allocated and reserved bytes of a sequence of requests. No torch here.

The rules are those of c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h (torch 2.11 to 2.13)
with default settings: no largest split size, no rounding to powers of two, no garbage collection, no private
pools. Of free blocks of equal size the lowest address is taken, so ``segments.DriverAddresses`` models the
driver's addresses. Each stream has its own pools. Assumed: no free is delayed by another stream's use
(``record_stream``).
"""

from bisect import bisect_left, insort
from collections.abc import Callable

from trainfit.ledger.segments import (
    LARGE_SEGMENT,
    MIN_BLOCK,
    MIN_LARGE,
    ROUND_LARGE,
    SMALL_SEGMENT,
    SMALL_SIZE,
    Block,
    DriverAddresses,
    ExpandableSegments,
    Pool,
)

TOP_ADDRESS = 1 << 47
"""Segments are below it."""


class OutOfMemory(RuntimeError):  # noqa: N818 - named as torch names it
    """No block fits, even after the cache was emptied; all attributes are bytes."""

    def __init__(self, requested: int, reserved: int, allocated: int, capacity: int):
        self.requested, self.reserved = requested, reserved
        self.allocated, self.capacity = allocated, capacity
        super().__init__(
            f"out of memory: {requested} bytes requested, {reserved} of {capacity} reserved, "
            f"{allocated} in use"
        )


def segment_size(rounded: int) -> int:
    """Return the bytes of a new segment for a rounded request (``get_allocation_size``)."""
    if rounded <= SMALL_SIZE:
        return SMALL_SEGMENT
    if rounded < MIN_LARGE:
        return LARGE_SEGMENT
    return -(-rounded // ROUND_LARGE) * ROUND_LARGE


class CachingAllocator:
    """One device's caching allocator.

    Args:
        capacity_bytes: limit on the sum of its segments; None for no limit.
        expandable_segments: as ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``.
        segment_address: maps the bytes of a new segment to its address; by default ``DriverAddresses``.

    Attributes:
        allocated_bytes: sum of the blocks in use, whole blocks counted.
        reserved_bytes: sum of the segments.
        num_retries: how often the cache was emptied to make room.
    """

    def __init__(
        self,
        capacity_bytes: int | None = None,
        expandable_segments: bool = False,
        segment_address: Callable[[int], int] | None = None,
    ):
        if capacity_bytes is not None and capacity_bytes <= 0:
            raise ValueError(f"capacity_bytes = {capacity_bytes}: must be positive; pass None for no limit")
        self.capacity_bytes = capacity_bytes
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.num_retries = 0
        self._expandable = ExpandableSegments(self._map, capacity_bytes) if expandable_segments else None
        self._pools: dict[tuple[bool, int], Pool] = {}
        self._blocks: dict[int, Block] = {}
        self._next_handle = 1
        self._segment_address = segment_address or DriverAddresses(TOP_ADDRESS).allocate

    def malloc(self, num_bytes: int, stream: int = 0) -> int:
        """Allocate ``num_bytes`` and return a handle for ``free``; 0 for zero bytes.

        Raises:
            OutOfMemory: no room, even after the cache was emptied.
        """
        if num_bytes <= 0:
            if num_bytes < 0:
                raise ValueError(f"num_bytes = {num_bytes}: must not be negative")
            return 0
        size = -(-num_bytes // MIN_BLOCK) * MIN_BLOCK
        small = size <= SMALL_SIZE
        pool = self._pools.get((small, stream))
        if pool is None:
            pool = self._pools[small, stream] = Pool(small, stream)
        free = pool.free
        index = bisect_left(free, (size,))  # The smallest that fits, the lowest address among equals.
        if index == len(free):
            block = self._new_block(pool, size, num_bytes)
        else:
            block = free.pop(self._least_growable(free, index) if self._expandable else index)[2]
        remaining = block.size - size
        if (remaining >= MIN_BLOCK) if small or self._expandable else (remaining > SMALL_SIZE):
            rest = block.split(size)
            insort(pool.free, (rest.size, rest.address, rest))
        block.allocated = True
        self.allocated_bytes = allocated = self.allocated_bytes + block.size
        if allocated > self.peak_allocated_bytes:
            self.peak_allocated_bytes = allocated
        handle = self._next_handle
        self._next_handle = handle + 1
        self._blocks[handle] = block
        return handle

    def free(self, handle: int) -> None:
        """Return a block to its pool, merged with free neighbours. No effect for handle 0.

        Raises:
            KeyError: unknown handle, or freed already.
        """
        if handle == 0:
            return
        block = self._blocks.pop(handle)
        self.allocated_bytes -= block.size
        block.allocated = False
        block.absorb_free()
        insort(block.pool.free, (block.size, block.address, block))

    def empty_cache(self) -> None:
        """Release unused segments to the driver (``torch.cuda.empty_cache``)."""
        for pool in self._pools.values():
            kept: list[tuple[int, int, Block]] = []
            for item in pool.free:
                block = item[2]
                if not block.expandable and block.before is None and block.after is None:
                    self.reserved_bytes -= block.size
                    self._on_segment("segment_free", pool, block.address, block.size)
                else:
                    kept.append(item)
            pool.free = kept
            if self._expandable:
                for address, num_bytes in self._expandable.unmap_free(pool):
                    self.reserved_bytes -= num_bytes
                    self._on_segment("segment_unmap", pool, address, num_bytes)

    def block(self, handle: int) -> Block:
        """Return the block of a handle in use."""
        return self._blocks[handle]

    def segments(self) -> list[list[Block]]:
        """Return each segment's blocks by address; of expandable segments the mapped runs."""
        free = [item[2] for pool in self._pools.values() for item in pool.free]
        found: list[list[Block]] = []
        for block in (*free, *self._blocks.values()):
            if block.before is None or not block.before.mapped:
                blocks = [block]
                while (after := blocks[-1].after) is not None and after.mapped:
                    blocks.append(after)
                found.append(blocks)
        return sorted(found, key=lambda blocks: blocks[0].address)

    def reset_peaks(self) -> None:
        """Set both peaks to the current values (``torch.cuda.reset_peak_memory_stats``)."""
        self.peak_allocated_bytes, self.peak_reserved_bytes = self.allocated_bytes, self.reserved_bytes

    def _least_growable(self, free: list[tuple[int, int, Block]], index: int) -> int:
        """Return the index to take: expandable blocks are compared by the size that they can grow to."""
        while index + 1 < len(free) and free[index + 1][2].growable_size < free[index][2].growable_size:
            index += 1
        return index

    def _new_block(self, pool: Pool, size: int, num_bytes: int) -> Block:
        """Allocate from the driver, retrying with an emptied cache (``alloc_block``)."""
        block = self._from_driver(pool, size)
        if block is None:
            self.num_retries += 1
            self.empty_cache()
            block = self._from_driver(pool, size)
        if block is None:
            raise OutOfMemory(num_bytes, self.reserved_bytes, self.allocated_bytes, self.capacity_bytes or 0)
        return block

    def _from_driver(self, pool: Pool, size: int) -> Block | None:
        if self._expandable:
            return self._expandable.allocate(pool, size)
        num_bytes = segment_size(size)
        if not self._reserve(num_bytes):
            return None
        address = self._segment_address(num_bytes)
        self._on_segment("segment_alloc", pool, address, num_bytes)
        return Block(address, num_bytes, pool)

    def _map(self, num_bytes: int, pool: Pool, address: int) -> bool:
        """Reserve pages of an expandable segment."""
        has_room = self._reserve(num_bytes)
        if has_room:
            self._on_segment("segment_map", pool, address, num_bytes)
        return has_room

    def _on_segment(self, action: str, pool: Pool, address: int, num_bytes: int) -> None:
        """Follow what is taken from the driver and given back; ``action`` as in a memory snapshot."""

    def _reserve(self, num_bytes: int) -> bool:
        """Add to the reserved bytes and return True, if the capacity allows it."""
        reserved = self.reserved_bytes + num_bytes
        if self.capacity_bytes is not None and reserved > self.capacity_bytes:
            return False
        self.reserved_bytes = reserved
        if reserved > self.peak_reserved_bytes:
            self.peak_reserved_bytes = reserved
        return True
