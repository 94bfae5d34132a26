"""Decoder blocks whose weights wait on the host: a few slots on the device hold the blocks that are at work.

Enters: a model built on ``meta``. Leaves: its parameters on the device, those of block i as views of slot i % S, and the
values of every block in one pinned buffer each. A model larger than the card's memory is built so, since no more than
S blocks are ever on the device: each is initialised in its slot and copied out.

The parameters never move: block i computes with its weights only between ``arrive(i)`` and another block takes the slot.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from trainfit.offload.copies import CopyStreams
from trainfit.offload.slot_buffer import SlotBuffer, padded, view


class HostBlocks:
    """The weights of ``blocks``, kept on the host.

    Args:
        num_slots: as ``SlotBuffer``'s.
    """

    def __init__(self, blocks: list[nn.Module], device: torch.device, num_slots: int):
        self.blocks, self.copy_streams = blocks, CopyStreams(device)
        self._places = [_places(block) for block in blocks]
        self.ring = SlotBuffer(self.copy_streams, num_slots, max(num_bytes for _, num_bytes in self._places))
        self.moments = SlotBuffer(self.copy_streams, num_slots)
        """For what optimizers keep of the weights (offload/optimizer_state.py)."""
        for index, block in enumerate(blocks):
            self._bind(index, block)

    def _bind(self, index: int, block: nn.Module) -> None:
        places, num_bytes = self._places[index]
        self.ring.invite(index, num_bytes)
        for module in block.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = torch.empty_like(buffer, device=self.copy_streams.device)
        for owner, name, tensor, start in places:
            value = view(self.ring.room(index), start, tensor)
            if isinstance(tensor, nn.Parameter):
                owner._parameters[name] = nn.Parameter(value, requires_grad=tensor.requires_grad)
            else:
                owner._buffers[name] = value
        block.register_state_dict_post_hook(self._saving(index))
        block.register_load_state_dict_pre_hook(self._loading(index))

    def keep(self, index: int) -> None:
        """What was written into block ``index``'s parameters is its value from now on, while the model is built."""
        self.ring.keep(index)

    def values(self, index: int) -> Iterator[tuple[str, Tensor]]:
        """Dotted names within the block, as they are now, and the host's views of its weights, to read or to write."""
        self.copy_streams.settle()
        self.ring.overwritten(index)
        # Adapters may have put the modules deeper since.
        paths = {id(module): path for path, module in self.blocks[index].named_modules()}
        for owner, name, tensor, start in self._places[index][0]:
            value = view(self.ring.host(index), start, tensor)
            yield f"{paths[id(owner)]}.{name}".removeprefix("."), value

    def parameters(self, index: int) -> list[nn.Parameter]:
        """Block ``index``'s parameters that share a slot with other blocks'."""
        found = [owner._parameters.get(name) for owner, name, _, _ in self._places[index][0]]
        return [parameter for parameter in found if parameter is not None]

    def _saving(self, index: int) -> Any:
        def values_of_the_host(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
            for name, value in self.values(index):
                if prefix + name in state:
                    state[prefix + name] = value

        return values_of_the_host

    def _loading(self, index: int) -> Any:
        def into_the_host(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
            # What loading writes into the parameters themselves is overwritten by the next block in the slot.
            for name, value in self.values(index):
                if prefix + name in state:
                    value.copy_(state[prefix + name])

        return into_the_host


def is_moment(value: Any, parameter: Tensor) -> bool:
    """Whether what an optimizer keeps of a weight that waits on the host waits there too: it is a matrix of its shape.

    8-bit states, several tensors in one, do not.
    """
    return (
        isinstance(value, Tensor)
        and value.dim() >= 2
        and value.shape == parameter.shape
        and not is_traceable_wrapper_subclass(value)
    )


Places = list[tuple[nn.Module, str, Tensor, int]]
"""A submodule, the name in it, the parameter (or a quantised weight's codes, a buffer) as built on meta, where it begins
(bytes)."""


def _places(block: nn.Module) -> tuple[Places, int]:
    places: Places = []
    end = 0
    for module in block.modules():
        codes = module._buffers if getattr(module, "num_quantized", 0) else {}
        for name, tensor in (*module._parameters.items(), *codes.items()):
            if tensor is not None:
                places.append((module, name, tensor, end))
                end += padded(tensor.numel() * tensor.element_size())
    return places, end
