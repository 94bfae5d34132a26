"""A ring of S device buffers for entries whose values live in pinned host memory.

Entry i uses buffer i % S, unless ``slots`` names another, so that large entries can share a buffer.

An entry is a block's weights or its optimizer state, as flat bytes on the host. Its buffer holds a copy from
``acquire`` until another entry takes the buffer, so contents depend only on the order of calls.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainfit.offload.copies import CopyStreams, Event, wait

ALIGN = 512  # Alignment of tensors in bytes, as that of the caching allocator's blocks


@dataclass
class _Buffer:
    """Device memory for one entry at a time."""

    flat: Tensor
    last_use: Event
    """End of the last use, its copy to the host included; at first, of any earlier use of the memory."""
    entry: int | None = None
    copied_in: Event = None  # End of the copy to the device; None once the computation waits for it


class DeviceRing:
    """Few device buffers for many entries.

    Args:
        num_buffers: 2: the next entry is copied in while one is used; 3: a changed one is also copied back
            meanwhile.
        min_bytes: Smallest size of a buffer; a larger entry enlarges its buffer.
        slots: The buffer of each entry; entries that follow each other in other buffers are copied ahead.
    """

    def __init__(
        self,
        copy_streams: CopyStreams,
        num_buffers: int,
        min_bytes: int = 0,
        slots: Sequence[int] | None = None,
    ):
        self._copy_streams, self._num_buffers, self._min_bytes = copy_streams, num_buffers, min_bytes
        self._slots = slots
        self._buffers: dict[int, _Buffer] = {}
        self._host: dict[int, Tensor] = {}
        self._written: dict[int | None, Event] = {}
        """By entry: the copy after which its host memory holds its newest value."""

    def add(self, index: int, num_bytes: int) -> Tensor:
        """Add an entry: return uninitialised host memory, and make its buffer large enough."""
        slot = self._slot(index)
        buffer = self._buffers.get(slot)
        if buffer is None or buffer.flat.numel() < num_bytes:
            for event in (buffer.copied_in, buffer.last_use) if buffer else ():
                wait(event)
            size = max(num_bytes, self._min_bytes)
            flat = torch.empty(size, dtype=torch.uint8, device=self._copy_streams.device)
            # The computation may still be reading freed memory that the allocator returns.
            self._buffers[slot] = _Buffer(flat, self._copy_streams.now())
        self._host[index] = self._copy_streams.host_empty((num_bytes,), torch.uint8)
        self.invalidate(index)
        return self._host[index]

    def host(self, index: int) -> Tensor:
        """Return the entry's bytes on the host, which are its value after ``CopyStreams.synchronize``."""
        return self._host[index]

    def buffer(self, index: int) -> Tensor:
        """Return the device memory of the entry's buffer."""
        return self._of(index).flat

    def buffers(self) -> list[Tensor]:
        """Return the device memory of every buffer."""
        return [buffer.flat for buffer in self._buffers.values()]

    def __contains__(self, index: int) -> bool:
        return index in self._host

    def acquire(self, index: int, then: int | None, *, to_write: bool = False) -> None:
        """Wait until the entry can be read, or with ``to_write`` written; start to copy in entry ``then``."""
        self._copy_in(index)
        buffer = self._of(index)
        wait(buffer.copied_in)
        buffer.copied_in = None
        if to_write:
            wait(self._written.get(index))  # Pending only in models of hardly more blocks than buffers.
        if then is not None and then in self._host and self._of(then) is not buffer:
            self._copy_in(then)

    def release(self, index: int, *, changed: bool) -> None:
        """Release the entry; with ``changed`` copy it back to the host."""
        buffer = self._of(index)
        buffer.last_use = self._copy_streams.now()
        if changed:
            self._copy_out(index, buffer)

    def store(self, index: int) -> None:
        """Copy the buffer to the host as the entry's value, and wait until it can be written again."""
        buffer = self._of(index)
        buffer.entry, buffer.last_use = index, self._copy_streams.now()
        self._copy_out(index, buffer)
        wait(buffer.last_use)

    def record_write(self, index: int, event: Event) -> None:
        """Record that another copy into the entry's host memory ends with ``event``."""
        self._written[index] = event

    def invalidate(self, index: int) -> None:
        """Invalidate the entry's copy on the device before its host memory is written from outside."""
        buffer = self._of(index)
        if buffer.entry == index:
            wait(self._written.get(index))
            buffer.entry = None

    def _copy_out(self, index: int, buffer: _Buffer) -> None:
        host = self._host[index]
        buffer.last_use = self._copy_streams.to_host.copy(host, buffer.flat[: host.numel()], buffer.last_use)
        self._written[index] = buffer.last_use

    def _copy_in(self, index: int) -> None:
        buffer, host = self._of(index), self._host[index]
        if buffer.entry != index:
            # The copy out of the previous entry may have started before its last use.
            after = buffer.last_use, self._written.get(index), self._written.get(buffer.entry)
            into = buffer.flat[: host.numel()]
            buffer.copied_in = self._copy_streams.to_device.copy(into, host, *after)
            buffer.entry = index

    def _of(self, index: int) -> _Buffer:
        return self._buffers[self._slot(index)]

    def _slot(self, index: int) -> int:
        return index % self._num_buffers if self._slots is None else self._slots[index]


def padded(num_bytes: int) -> int:
    """Return the bytes of a tensor within an entry, rounded up to ALIGN."""
    return -(-num_bytes // ALIGN) * ALIGN


def view(flat: Tensor, start: int, like: Tensor) -> Tensor:
    """Return a view of ``flat`` from byte ``start`` with the shape and dtype of ``like``.

    It has its own version counter, so autograd does not take the buffer's next entry for an in-place change.
    """
    part = flat.data[start : start + like.numel() * like.element_size()]
    return part.view(like.dtype).view(like.shape)
