"""Guests whose memory is on the host and who come to the device by turns: guest i stays in slot i % S.

A guest is an index with a flat piece of bytes (a block's weights, or what its optimizer keeps). Its bytes on the host are
its value; on the device they are a copy between ``arrive`` and the slot's next guest. Which slot holds whom follows from
the order of the calls alone.
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
    """Device memory for one guest."""

    flat: Tensor
    guest: int | None = None
    arrived: Event = None
    """The guest is there; None once the computation waits for it."""
    left: Event = None
    """The last use of the slot, its copy back included, is over; at first, of what was in its memory before."""


class Ring:
    """Few slots on the device for many guests.

    Args:
        num_slots: 2: the next guest comes while one is used; 3: a changed one also goes back meanwhile.
        least_bytes: size of a slot at least; a guest that needs more gets its slot a larger one.
    """

    def __init__(self, copy_streams: CopyStreams, num_slots: int, least_bytes: int = 0):
        self._copy_streams, self._num_slots, self._least_bytes = copy_streams, num_slots, least_bytes
        self._slots: dict[int, _Slot] = {}
        self._host: dict[int, Tensor] = {}
        self._written: dict[int, Event] = {}
        """A guest's values on the host are its newest."""

    def invite(self, index: int, num_bytes: int) -> Tensor:
        """Host memory for a new guest, without values; its slot is made large enough."""
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
        """The guest's bytes on the host; its values once ``CopyStreams.settle`` has returned."""
        return self._host[index]

    def room(self, index: int) -> Tensor:
        """The device memory in which the guest is while it is there."""
        return self._slot(index).flat

    def slots(self) -> list[Tensor]:
        """All device memory."""
        return [slot.flat for slot in self._slots.values()]

    def __contains__(self, index: int) -> bool:
        return index in self._host

    def arrive(self, index: int, then: int | None, *, to_change: bool = False) -> None:
        """The guest may be used, or with ``to_change`` written into, from here on; guest ``then`` is on its way."""
        self._fetch(index)
        slot = self._slot(index)
        wait(slot.arrived)
        slot.arrived = None
        if to_change:
            wait(self._written.get(index))  # Long over, except in a model of hardly more blocks than slots.
        if then is not None and then in self._host and self._slot(then) is not slot:
            self._fetch(then)

    def leave(self, index: int, *, changed: bool) -> None:
        """The guest is no longer used; with ``changed`` it goes back to the host."""
        slot = self._slot(index)
        slot.left = self._copy_streams.now()
        if changed:
            self._write(index, slot)

    def keep(self, index: int) -> None:
        """What has been written into the guest's room is its value; the room may be written into again."""
        slot = self._slot(index)
        slot.guest, slot.left = index, self._copy_streams.now()
        self._write(index, slot)
        wait(slot.left)

    def wrote(self, index: int, event: Event) -> None:
        """Somebody's copy into the guest's memory on the host ends with ``event``."""
        self._written[index] = event

    def overwritten(self, index: int) -> None:
        """The guest's bytes on the host may be written into from outside: what is on the device is not its value."""
        slot = self._slot(index)
        if slot.guest == index:
            wait(self._written.get(index))
            slot.guest = None

    def _write(self, index: int, slot: _Slot) -> None:
        host = self._host[index]
        slot.left = self._copy_streams.to_host.copy(host, slot.flat[: host.numel()], slot.left)
        self._written[index] = slot.left

    def _fetch(self, index: int) -> None:
        slot = self._slot(index)
        if slot.guest == index:
            return
        host = self._host[index]
        own, others = self._written.get(index), None
        if slot.guest is not None:
            others = self._written.get(slot.guest)  # It may be used again after it began to go back.
        slot.arrived = self._copy_streams.to_device.copy(
            slot.flat[: host.numel()], host, slot.left, own, others
        )
        slot.guest = index

    def _slot(self, index: int) -> _Slot:
        return self._slots[index % self._num_slots]


def padded(num_bytes: int) -> int:
    """Bytes that one tensor takes in a guest's memory: a multiple of what the caching allocator aligns to."""
    return -(-num_bytes // ALIGN) * ALIGN


def view(flat: Tensor, start: int, like: Tensor) -> Tensor:
    """``like``'s shape and dtype at ``start`` bytes, with a version counter of its own: autograd must not mind the next guest."""
    part = flat.data[start : start + like.numel() * like.element_size()]
    return part.view(like.dtype).view(like.shape)
