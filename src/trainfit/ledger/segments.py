"""Blocks of device memory, the pools they lie in, and segments that grow (the allocator's parts).

Sizes and addresses are bytes. The constants are those of c10/core/AllocatorConfig.h.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Optional

MIN_BLOCK = 512
"""Every request is rounded up to a multiple of this (kMinBlockSize)."""
SMALL_SIZE = 1 << 20
"""The largest request that the small pool serves (kSmallSize)."""
SMALL_SEGMENT = 2 << 20
"""A small pool's segment (kSmallBuffer)."""
MIN_LARGE = 10 << 20
"""Requests below it share segments of LARGE_SEGMENT (kMinLargeAlloc)."""
LARGE_SEGMENT = 20 << 20
"""kLargeBuffer; the setting ``large_segment_size_mb`` in newer versions."""
ROUND_LARGE = 2 << 20
"""Larger requests get a segment of their own size, rounded up to this (kRoundLarge)."""
STRETCH = 32 << 20
"""The driver takes address space in multiples of this (measured, see DriverAddresses)."""
CONTEXT_ROOM = 320 << 20
"""Of the address space that a context begins with, what kernels' code and the driver's own leave to segments: 274 to 348 MiB
in the six of ten runs on an H200 that filled it.
"""
LARGEST_IN_ROOM = 64 << 20
"""The largest segment seen there. One of 198 MiB, which came first, lay elsewhere, and so did all after it."""
UNLIMITED_DEVICE = 1 << 50
"""Address space of an expandable segment when no capacity is given."""


class Pool:
    """Free blocks of one size class and stream.

    ``free``: (bytes, address, block), sorted: best fit is the first that is large enough.
    ``unmapped``: (address, block) of address space without memory, for expandable segments.
    """

    __slots__ = ("free", "small", "stream", "unmapped")

    def __init__(self, small: bool, stream: int):
        self.small, self.stream = small, stream
        self.free: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []


class Block:
    """A stretch of one segment; ``before`` and ``after`` are its neighbours there."""

    __slots__ = ("address", "after", "allocated", "before", "expandable", "mapped", "pool", "size")

    def __init__(self, address: int, size: int, pool: Pool, expandable: bool = False):
        self.address, self.size, self.pool, self.expandable = address, size, pool, expandable
        self.allocated, self.mapped = False, True
        self.before: Optional[Block] = None  # noqa: UP045 - a forward reference
        self.after: Optional[Block] = None  # noqa: UP045

    @property
    def reach(self) -> int:
        """Bytes it has, or would have with the unmapped space behind it."""
        after = self.after
        return self.size + (after.size if after is not None and not after.mapped else 0)


class DriverAddresses:
    """Where cudaMalloc puts a segment.

    A context begins with 512 MiB of address space. What the driver leaves of it serves segments first, upwards, until one
    finds no place there. From then on address space is taken in stretches of whole 32 MiB, each right below the last; what a
    segment leaves of its stretch serves later segments that fit, upwards, the lowest stretch first.

    Read off an H200 (driver 580). The stretches: 82 % of 5,870 segments of 14 runs, the others lay where the host's own
    mappings or the driver's were in the way. The context's room: ten small runs, which then agree in every phase to the byte.
    """

    def __init__(self, top: int):
        self._room = top - CONTEXT_ROOM, top
        """Begin and end of what is left of the context's own."""
        self._lowest = top - CONTEXT_ROOM
        self._gaps: list[tuple[int, int]] = []
        """(address, bytes) left over, the lowest last."""

    def place(self, num_bytes: int) -> int:
        """Address of a new segment of so many bytes."""
        begin, end = self._room
        if num_bytes <= min(end - begin, LARGEST_IN_ROOM):
            self._room = begin + num_bytes, end
            return begin
        self._room = end, end
        if num_bytes < STRETCH:
            for index in range(len(self._gaps) - 1, -1, -1):
                address, left = self._gaps[index]
                if left >= num_bytes:
                    self._leave(index, address + num_bytes, left - num_bytes)
                    return address
        stretch = -(-num_bytes // STRETCH) * STRETCH
        self._lowest -= stretch
        if stretch > num_bytes:
            self._gaps.append((self._lowest + num_bytes, stretch - num_bytes))
        return self._lowest

    def _leave(self, index: int, address: int, num_bytes: int) -> None:
        if num_bytes:
            self._gaps[index] = (address, num_bytes)
        else:
            del self._gaps[index]


class ExpandableSegments:
    """Segments of reserved addresses, given memory page by page (``expandable_segments:True``).

    One segment spans 9/8 of the device's memory; its pages are 2 MiB in the small pool, 20 MiB in the large one.

    Args:
        reserve: counts bytes as reserved and says whether there is room.
        capacity_bytes: the device's memory, None for no limit.
    """

    def __init__(self, reserve: Callable[[int], bool], capacity_bytes: int | None):
        self.reserve = reserve
        self.span = (capacity_bytes or UNLIMITED_DEVICE) * 9 // 8
        self.span -= self.span % LARGE_SEGMENT
        self._num_segments = 0

    def allocate(self, pool: Pool, size: int) -> Block | None:
        """A mapped block of at least ``size`` bytes, out of the pool (``try_allocate_expandable_block``).

        None where the device has no room.
        """
        block = self._find(pool, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            behind = block.after
            if behind is None or not self._map(behind, min(size - block.size, behind.size)):
                return None
            block = behind  # ``behind`` took the block before it in.
        del pool.free[bisect_left(pool.free, (block.size, block.address))]
        return block

    def unmap_free(self, pool: Pool) -> int:
        """Give back the pages that lie wholly in free blocks; returns their bytes (``unmap_block``)."""
        page, released = _page(pool), 0
        for size, address, block in list(pool.free):
            base = block.address % self.span
            start, end = -(-base // page) * page, (base + size) // page * page
            if not block.expandable or end <= start:
                continue
            released += end - start
            del pool.free[bisect_left(pool.free, (size, address))]
            self._unmap(block, start - base, end - start)
        return released

    def _find(self, pool: Pool, size: int) -> Block:
        """The first unmapped stretch, with free blocks beside it, that has room (``find_expandable_block``)."""
        for _, block in pool.unmapped:
            start = block.before if block.before is not None and not block.before.allocated else block
            room, at = 0, start
            while at is not None and not at.allocated and room < size:
                room, at = room + at.size, at.after
            if room >= size:
                return start
        # Addresses of different segments never meet; the span is a multiple of both page sizes.
        block = Block(self._num_segments * self.span, self.span, pool, expandable=True)
        self._num_segments += 1
        block.mapped = False
        insort(pool.unmapped, (block.address, block), key=_address)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Give the unmapped block's first ``size`` bytes memory, in whole pages; join it with free neighbours."""
        pool, page = block.pool, _page(block.pool)
        begin = block.address // page * page
        end = -(-(block.address + size) // page) * page
        mapped = min(end - begin, block.size)
        if not self.reserve(mapped):
            return False
        _remove(pool.unmapped, block)
        block.mapped = True
        if mapped < block.size:
            rest = Block(block.address + mapped, block.size - mapped, pool, expandable=True)
            rest.mapped = False
            rest.before, rest.after = block, block.after
            if rest.after is not None:
                rest.after.before = rest
            block.after, block.size = rest, mapped
            insort(pool.unmapped, (rest.address, rest), key=_address)
        _join(block, pool)
        insort(pool.free, (block.size, block.address, block))
        return True

    def _unmap(self, block: Block, offset: int, size: int) -> None:
        """Turn ``size`` bytes at ``offset`` of a block out of the pool into unmapped space; the rest stays free."""
        pool = block.pool
        if offset:
            first = Block(block.address, offset, pool, expandable=True)
            first.before, first.after = block.before, block
            if first.before is not None:
                first.before.after = first
            block.before, block.address, block.size = first, block.address + offset, block.size - offset
            insort(pool.free, (first.size, first.address, first))
        if size < block.size:
            last = Block(block.address + size, block.size - size, pool, expandable=True)
            last.before, last.after = block, block.after
            if last.after is not None:
                last.after.before = last
            block.after, block.size = last, size
            insort(pool.free, (last.size, last.address, last))
        block.mapped = False
        for neighbour in (block.before, block.after):
            if neighbour is not None and not neighbour.mapped:
                _remove(pool.unmapped, neighbour)
                _absorb(block, neighbour)
        insort(pool.unmapped, (block.address, block), key=_address)


def _page(pool: Pool) -> int:
    return SMALL_SEGMENT if pool.small else LARGE_SEGMENT


def _address(item: tuple[int, Block]) -> int:
    return item[0]


def _remove(unmapped: list[tuple[int, Block]], block: Block) -> None:
    del unmapped[bisect_left(unmapped, block.address, key=_address)]


def _join(block: Block, pool: Pool) -> None:
    """Take free mapped neighbours into a block that is out of the pool."""
    for neighbour in (block.before, block.after):
        if neighbour is not None and neighbour.mapped and not neighbour.allocated:
            del pool.free[bisect_left(pool.free, (neighbour.size, neighbour.address))]
            _absorb(block, neighbour)


def _absorb(block: Block, neighbour: Block) -> None:
    if neighbour is block.before:
        block.address, block.before = neighbour.address, neighbour.before
        if block.before is not None:
            block.before.after = block
    else:
        block.after = neighbour.after
        if block.after is not None:
            block.after.before = block
    block.size += neighbour.size
