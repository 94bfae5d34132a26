"""A ring of device buffers shared by entries whose values live in pinned host memory: entry i uses slot i % S.

An entry is an index with a flat piece of bytes: a block's weights, or its optimizer state. The bytes on the host are its
value. On the device they are a copy, from ``arrive`` until another entry takes the slot. Which slot holds which entry
follows from the order of the calls alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainfit.offload.copies import CopyStreams, Event, wait

ALIGN = 512
"""Bytes at whose multiples tensors begin, as the caching allocator's blocks do."""


@dataclass
class _Slot:
    """Device memory for one entry at a time."""

    flat: Tensor
    entry: int | None = None
    arrived: Event = None
    """The copy to the device has ended; None once the computation waits for it."""
    left: Event = None
    """The last use of the slot has ended, its copy back included; at first, the last use of that memory before."""


class SlotBuffer:
    """Few slots on the device for many entries.

    Args:
        num_slots: 2: the next entry is copied in while one is used; 3: a changed one is also copied back meanwhile.
        least_bytes: smallest size of a slot; an entry that needs more makes its slot larger.
    """

    def __init__(self, copy_streams: CopyStreams, num_slots: int, least_bytes: int = 0):
        self._copy_streams, self._num_slots, self._least_bytes = copy_streams, num_slots, least_bytes
        self._slots: dict[int, _Slot] = {}
        self._host: dict[int, Tensor] = {}
        self._written: dict[int, Event] = {}
        """By entry: the copy after which its host memory holds its newest value."""

    def invite(self, index: int, num_bytes: int) -> Tensor:
        """Return uninitialised host memory for a new entry, and make its slot large enough."""
        slot = self._slots.get(index % self._num_slots)
        if slot is None or slot.flat.numel() < num_bytes:
            if slot is not None:
                wait(slot.arrived)
                wait(slot.left)
            size = max(num_bytes, self._least_bytes)
            flat = torch.empty(size, dtype=torch.uint8, device=self._copy_streams.device)
            # The allocator gives memory that the computation may still be reading for something else.
            self._slots[index % self._num_slots] = _Slot(flat, left=self._copy_streams.now())
        self._host[index] = self._copy_streams.host_empty((num_bytes,), torch.uint8)
        self.overwritten(index)
        return self._host[index]

    def host(self, index: int) -> Tensor:
        """Return the entry's bytes on the host; they are its value once ``CopyStreams.settle`` has returned."""
        return self._host[index]

    def room(self, index: int) -> Tensor:
        """Return the device memory of the entry's slot."""
        return self._slot(index).flat

    def slots(self) -> list[Tensor]:
        """Return the device memory of every slot."""
        return [slot.flat for slot in self._slots.values()]

    def __contains__(self, index: int) -> bool:
        return index in self._host

    def arrive(self, index: int, then: int | None, *, to_change: bool = False) -> None:
        """Wait until the entry can be used, with ``to_change`` also written; begin to copy entry ``then`` to the device."""
        self._fetch(index)
        slot = self._slot(index)
        wait(slot.arrived)
        slot.arrived = None
        if to_change:
            wait(self._written.get(index))  # Long over, except in a model of hardly more blocks than slots.
        if then is not None and then in self._host and self._slot(then) is not slot:
            self._fetch(then)

    def leave(self, index: int, *, changed: bool) -> None:
        """Release the entry; with ``changed`` copy it back to the host."""
        slot = self._slot(index)
        slot.left = self._copy_streams.now()
        if changed:
            self._write(index, slot)

    def keep(self, index: int) -> None:
        """Copy to the host what was written into the entry's slot, and wait until the slot may be written again."""
        slot = self._slot(index)
        slot.entry, slot.left = index, self._copy_streams.now()
        self._write(index, slot)
        wait(slot.left)

    def wrote(self, index: int, event: Event) -> None:
        """Note that another copy into the entry's host memory ends with ``event``."""
        self._written[index] = event

    def overwritten(self, index: int) -> None:
        """Invalidate the entry's copy on the device: its host memory is about to be written from outside."""
        slot = self._slot(index)
        if slot.entry == index:
            wait(self._written.get(index))
            slot.entry = None

    def _write(self, index: int, slot: _Slot) -> None:
        host = self._host[index]
        slot.left = self._copy_streams.to_host.copy(host, slot.flat[: host.numel()], slot.left)
        self._written[index] = slot.left

    def _fetch(self, index: int) -> None:
        slot = self._slot(index)
        if slot.entry == index:
            return
        host = self._host[index]
        own, others = self._written.get(index), None
        if slot.entry is not None:
            others = self._written.get(slot.entry)  # It may be used again after it began to go back.
        slot.arrived = self._copy_streams.to_device.copy(
            slot.flat[: host.numel()], host, slot.left, own, others
        )
        slot.entry = index

    def _slot(self, index: int) -> _Slot:
        return self._slots[index % self._num_slots]


def padded(num_bytes: int) -> int:
    """Return the bytes of one tensor within an entry, rounded up to the caching allocator's alignment."""
    return -(-num_bytes // ALIGN) * ALIGN


def view(flat: Tensor, start: int, like: Tensor) -> Tensor:
    """``like``'s shape and dtype at ``start`` bytes, with a version counter of its own: autograd must not see the next entry as a write."""
    part = flat.data[start : start + like.numel() * like.element_size()]
    return part.view(like.dtype).view(like.shape)
