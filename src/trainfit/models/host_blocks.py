"""Decoder blocks whose weights wait on the host: a few slots on the device hold the blocks that are at work.

Enters: a model built on ``meta``. Leaves: its parameters on the device, those of block i as views of slot i % S, and the
values of every block in one pinned buffer each. A model larger than the card's memory is built so, since no more than
S blocks are ever on the device: each is initialised in its slot and copied out.

The parameters never move: block i computes with its weights only between ``arrive(i)`` and the slot's next guest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainfit.kernels.host_copies import Lane, host_empty, now, wait

ALIGN = 512
"""Bytes at whose multiples parameters begin in a slot, as the caching allocator's blocks do."""


@dataclass
class _Slot:
    """Device memory for one block's weights."""

    flat: Tensor
    guest: int | None = None
    arrived: Any = None
    """Event: the guest's weights are there."""
    left: Any = None
    """Event: the last use of the slot, its copy back included, is over."""


class HostBlocks:
    """The weights of ``blocks``, kept on the host.

    Args:
        num_slots: 2: the next block's weights come while one computes; 3: an updated block's also go back meanwhile.
    """

    def __init__(self, blocks: list[nn.Module], device: torch.device, num_slots: int):
        self.blocks, self.device = blocks, device
        self._places = [_places(block) for block in blocks]
        slot_bytes = max(end for _, end in self._places)
        self._slots = [
            _Slot(torch.empty(slot_bytes, dtype=torch.uint8, device=device))
            for _ in range(min(num_slots, len(blocks)))
        ]
        self._host: list[Tensor] = []
        self._written: list[Any] = [None] * len(blocks)
        """Event: a block's values on the host are its newest."""
        self._in, self._out = Lane(device), Lane(device)
        for index, block in enumerate(blocks):
            self._bind(index, block)

    def _bind(self, index: int, block: nn.Module) -> None:
        places, num_bytes = self._places[index]
        slot = self._slot(index)
        for owner, name, parameter, start in places:
            view = _view(slot.flat, start, parameter)
            owner._parameters[name] = nn.Parameter(view, requires_grad=parameter.requires_grad)
        for module in block.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = torch.empty_like(buffer, device=self.device)
        self._host.append(host_empty((num_bytes,), torch.uint8, like=slot.flat))
        block.register_state_dict_post_hook(self._saving(index))
        block.register_load_state_dict_pre_hook(self._loading(index))

    def keep(self, index: int) -> None:
        """What was written into block ``index``'s parameters is its value from now on (while it is built, or loaded)."""
        slot = self._slot(index)
        slot.left = self._written[index] = self._out.copy(
            self._host[index], slot.flat[: self._host[index].numel()], now(self.device)
        )
        slot.guest = index
        # The next block's first values are written by the computation itself.
        wait(slot.left)

    def arrive(self, index: int, then: int | None) -> None:
        """Block ``index`` may compute from here on; the weights of block ``then`` are on their way."""
        self._fetch(index)
        slot = self._slot(index)
        wait(slot.arrived)
        slot.arrived = None
        if then is not None and self._slot(then) is not slot:
            self._fetch(then)

    def leave(self, index: int, *, changed: bool) -> None:
        """Block ``index`` is done; with ``changed`` its weights go back to the host."""
        slot = self._slot(index)
        slot.left = now(self.device)
        if changed:
            num_bytes = self._host[index].numel()
            slot.left = self._out.copy(self._host[index], slot.flat[:num_bytes], slot.left)
            self._written[index] = slot.left

    def _fetch(self, index: int) -> None:
        slot = self._slot(index)
        if slot.guest == index:
            return
        source = self._host[index]
        slot.arrived = self._in.copy(slot.flat[: source.numel()], source, slot.left, self._written[index])
        slot.guest = index

    def _slot(self, index: int) -> _Slot:
        return self._slots[index % len(self._slots)]

    def values(self, index: int) -> Iterator[tuple[str, Tensor]]:
        """Dotted names within the block, as they are now, and the host's views of its parameters."""
        if self._written[index] is not None:
            self._written[index].synchronize()
        # Adapters may have put the modules deeper since.
        paths = {id(module): path for path, module in self.blocks[index].named_modules()}
        for owner, name, parameter, start in self._places[index][0]:
            yield f"{paths[id(owner)]}.{name}".removeprefix("."), _view(self._host[index], start, parameter)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that share the slots."""
        for places, _ in self._places:
            for owner, name, _, _ in places:
                parameter = owner._parameters[name]
                assert parameter is not None
                yield parameter

    def _saving(self, index: int) -> Any:
        def values_of_the_host(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
            for name, value in self.values(index):
                if prefix + name in state:
                    state[prefix + name] = value

        return values_of_the_host

    def _loading(self, index: int) -> Any:
        def into_the_host(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
            for name, value in self.values(index):
                if prefix + name in state:
                    value.copy_(state[prefix + name])
            # What loading writes into the parameters themselves is overwritten by the next guest.
            self._slot(index).guest = None

        return into_the_host


Places = list[tuple[nn.Module, str, nn.Parameter, int]]
"""A submodule, the name in it, the parameter as built on meta, where it begins (bytes)."""


def _places(block: nn.Module) -> tuple[Places, int]:
    places: Places = []
    end = 0
    for module in block.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.append((module, name, parameter, end))
                end += -(-parameter.numel() * parameter.element_size() // ALIGN) * ALIGN
    return places, end


def _view(flat: Tensor, start: int, like: Tensor) -> Tensor:
    """``like``'s shape and dtype at ``start`` bytes, with a version counter of its own: autograd must not mind the next guest."""
    part = flat.data[start : start + like.numel() * like.element_size()]
    return part.view(like.dtype).view(like.shape)
