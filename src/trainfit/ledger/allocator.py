"""The CUDA caching allocator, replayed: which blocks a sequence of requests gets, and what it reserves for them.

Enters: sizes in bytes and frees, in order. Leaves: the bytes that ``torch.cuda.memory_allocated`` and
``torch.cuda.memory_reserved`` would report. No torch and no GPU here.

The rules are those of c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h (torch 2.11 to 2.13) with
default settings: no largest split size, no rounding to powers of two, no garbage collection, no private pools.
Addresses decide between free blocks of equal size, and the driver chooses them: ``device_memory.DriverAddresses``. Told
the real ones, this allocator put each block of 14 runs on an H200 at the very address it had there. Assumed: frees are
not delayed by another stream's use of the block (``record_stream``).
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
"""Segments lie below it."""


class OutOfMemory(RuntimeError):  # noqa: N818 - named as torch names it
    """No block could be had, also after the cache was given back.

    Attributes:
        requested: bytes that the program asked for.
        reserved: bytes in segments when it asked, after the cache was given back.
        allocated: bytes in use at that moment.
        capacity: bytes the allocator may reserve.
    """

    def __init__(self, requested: int, reserved: int, allocated: int, capacity: int):
        self.requested, self.reserved, self.allocated, self.capacity = (
            requested,
            reserved,
            allocated,
            capacity,
        )
        super().__init__(
            f"out of memory: {requested} bytes requested, {reserved} of {capacity} reserved, {allocated} in use"
        )


def segment_size(rounded: int) -> int:
    """Bytes asked of the driver when no cached block fits a rounded request (``get_allocation_size``)."""
    if rounded <= SMALL_SIZE:
        return SMALL_SEGMENT
    if rounded < MIN_LARGE:
        return LARGE_SEGMENT
    return (rounded + ROUND_LARGE - 1) // ROUND_LARGE * ROUND_LARGE


class CachingAllocator:
    """One device's caching allocator.

    Args:
        capacity_bytes: what its segments together may take; None is no limit.
        expandable_segments: as ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``.
        place: address of a new segment of so many bytes; by default where a driver is expected to put it.

    Attributes, all in bytes: ``allocated_bytes`` (sum of the blocks in use, whole blocks counted),
    ``reserved_bytes`` (sum of the segments), ``peak_allocated_bytes``, ``peak_reserved_bytes``; and ``num_retries``
    (how often the whole cache was given back to make room).
    """

    def __init__(
        self,
        capacity_bytes: int | None = None,
        expandable_segments: bool = False,
        place: Callable[[int], int] | None = None,
    ):
        if capacity_bytes is not None and capacity_bytes <= 0:
            raise ValueError(f"capacity_bytes = {capacity_bytes}: must be positive; pass None for no limit")
        self.capacity_bytes = capacity_bytes
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.num_retries = 0
        self._expandable = ExpandableSegments(self._reserve, capacity_bytes) if expandable_segments else None
        self._pools: dict[tuple[bool, int], Pool] = {}
        self._blocks: dict[int, Block] = {}
        self._next_handle, self._place = 1, place or DriverAddresses(TOP_ADDRESS).place

    def malloc(self, num_bytes: int, stream: int = 0) -> int:
        """Allocate; returns a handle to free later. Zero bytes take nothing: handle 0.

        Raises:
            OutOfMemory: no room, even with the cache given back.
        """
        if num_bytes <= 0:
            if num_bytes < 0:
                raise ValueError(f"num_bytes = {num_bytes}: must not be negative")
            return 0
        size = (num_bytes + 511) // 512 * 512
        small = size <= SMALL_SIZE
        pool = self._pools.get((small, stream))
        if pool is None:
            pool = self._pools[small, stream] = Pool(small, stream)
        block = self._take_free(pool, size) or self._new_block(pool, size, num_bytes)
        remaining = block.size - size
        if (remaining >= MIN_BLOCK) if small or self._expandable else (remaining > SMALL_SIZE):
            self._split(pool, block, size)
        block.allocated = True
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        handle = self._next_handle
        self._next_handle = handle + 1
        self._blocks[handle] = block
        return handle

    def free(self, handle: int) -> None:
        """Give a block back to its pool, joined with free neighbours. Handle 0 is nothing.

        Raises:
            KeyError: the handle was never given out or is freed already.
        """
        if handle == 0:
            return
        block = self._blocks.pop(handle)
        self.allocated_bytes -= block.size
        block.allocated = False
        pool = block.pool
        free, before, after = pool.free, block.before, block.after
        if before is not None and not before.allocated and before.mapped:
            del free[bisect_left(free, (before.size, before.address))]
            block.address, block.size = before.address, block.size + before.size
            block.before = before.before
            if block.before is not None:
                block.before.after = block
        if after is not None and not after.allocated and after.mapped:
            del free[bisect_left(free, (after.size, after.address))]
            block.size += after.size
            block.after = after.after
            if block.after is not None:
                block.after.before = block
        insort(free, (block.size, block.address, block))

    def block_size(self, handle: int) -> int:
        """Bytes that a live handle's block takes: its rounded request, or more where the block was not split."""
        return self._blocks[handle].size if handle else 0

    def empty_cache(self) -> None:
        """Give segments that are wholly free back to the driver (``torch.cuda.empty_cache``)."""
        for pool in self._pools.values():
            kept: list[tuple[int, int, Block]] = []
            for item in pool.free:
                block = item[2]
                if not block.expandable and block.before is None and block.after is None:
                    self.reserved_bytes -= block.size
                else:
                    kept.append(item)
            pool.free = kept
            if self._expandable:
                self.reserved_bytes -= self._expandable.unmap_free(pool)

    def reset_peaks(self) -> None:
        """Start both peaks anew from what is there now (``torch.cuda.reset_peak_memory_stats``)."""
        self.peak_allocated_bytes, self.peak_reserved_bytes = self.allocated_bytes, self.reserved_bytes

    def segments(self) -> list[list[tuple[int, int, bool]]]:
        """Every segment as its blocks in order of address: (address, bytes, in use). For checks and pictures."""
        seen: dict[int, Block] = {}
        for block in [*self._blocks.values(), *(item[2] for p in self._pools.values() for item in p.free)]:
            while block.before is not None and block.before.mapped:
                block = block.before
            seen[block.address] = block
        rows = []
        for _, head in sorted(seen.items()):
            row, block = [], head
            while block is not None and block.mapped:
                row.append((block.address, block.size, block.allocated))
                block = block.after
            rows.append(row)
        return rows

    def _take_free(self, pool: Pool, size: int) -> Block | None:
        """The smallest free block that fits, the lowest address among equals (``get_free_block``)."""
        free = pool.free
        index = bisect_left(free, (size,))
        if index == len(free):
            return None
        if self._expandable:
            # A block that can grow counts as large as it can grow to.
            while index + 1 < len(free) and free[index + 1][2].reach < free[index][2].reach:
                index += 1
        return free.pop(index)[2]

    def _new_block(self, pool: Pool, size: int, num_bytes: int) -> Block:
        """A block from the driver; when that fails, once more with the cache given back (``alloc_block``)."""
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
        return Block(self._place(num_bytes), num_bytes, pool)

    def _reserve(self, num_bytes: int) -> bool:
        """Count ``num_bytes`` more as reserved, if the capacity allows it."""
        reserved = self.reserved_bytes + num_bytes
        if self.capacity_bytes is not None and reserved > self.capacity_bytes:
            return False
        self.reserved_bytes = reserved
        if reserved > self.peak_reserved_bytes:
            self.peak_reserved_bytes = reserved
        return True

    def _split(self, pool: Pool, block: Block, size: int) -> None:
        """Keep the first ``size`` bytes of the block; what is left becomes a free block behind it."""
        rest = Block(block.address + size, block.size - size, pool, block.expandable)
        rest.before, rest.after = block, block.after
        if rest.after is not None:
            rest.after.before = rest
        block.after, block.size = rest, size
        insort(pool.free, (rest.size, rest.address, rest))
