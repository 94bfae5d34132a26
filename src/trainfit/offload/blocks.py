"""Decoder blocks whose weights live in pinned host memory; a ring of device buffers holds active ones.

A model is built on ``meta``. The parameters of block i become views of device buffer i % S, and its values
one pinned host buffer. At most S blocks are on the device, each is initialised there and copied out, so
models larger than the device's memory can be built. A parameter's value is valid from ``acquire(i)`` until
another block takes the buffer.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from trainfit.offload.copies import CopyStreams
from trainfit.offload.device_ring import DeviceRing, padded, view


class HostBlocks:
    """The weights of ``blocks`` on the host; ``num_buffers`` as in ``DeviceRing``."""

    def __init__(self, blocks: list[nn.Module], device: torch.device, num_buffers: int):
        self.blocks, self.copy_streams = blocks, CopyStreams(device)
        self._layouts = [_layout(block) for block in blocks]
        largest_bytes = max(num_bytes for _, num_bytes in self._layouts)
        self.ring = DeviceRing(self.copy_streams, num_buffers, largest_bytes)
        self.moments = DeviceRing(self.copy_streams, num_buffers)
        """Optimizer state of the weights (offload/optimizer_state.py)."""
        for index, block in enumerate(blocks):
            self._bind(index, block)

    def _bind(self, index: int, block: nn.Module) -> None:
        layout, num_bytes = self._layouts[index]
        self.ring.add(index, num_bytes)
        for module in block.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = torch.empty_like(buffer, device=self.copy_streams.device)
        for owner, name, tensor, start in layout:
            value = view(self.ring.buffer(index), start, tensor)
            if isinstance(tensor, nn.Parameter):
                owner._parameters[name] = nn.Parameter(value, requires_grad=tensor.requires_grad)
            else:
                owner._buffers[name] = value
        block.register_state_dict_post_hook(partial(self._save, index))
        block.register_load_state_dict_pre_hook(partial(self._load, index))

    def store(self, index: int) -> None:
        """Store what was written into block ``index``'s parameters while the model is built."""
        self.ring.store(index)

    def values(self, index: int) -> Iterator[tuple[str, Tensor]]:
        """Yield current dotted names within the block, and host views of its weights to read or write."""
        self.copy_streams.synchronize()
        self.ring.invalidate(index)
        # Adapters may have wrapped the modules.
        paths = {id(module): path for path, module in self.blocks[index].named_modules()}
        for owner, name, tensor, start in self._layouts[index][0]:
            value = view(self.ring.host(index), start, tensor)
            yield f"{paths[id(owner)]}.{name}".removeprefix("."), value

    def parameters(self, index: int) -> list[nn.Parameter]:
        """Return block ``index``'s parameters that live in the ring."""
        found = [owner._parameters.get(name) for owner, name, _, _ in self._layouts[index][0]]
        return [parameter for parameter in found if parameter is not None]

    def _save(self, index: int, _: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        for name, value in self.values(index):
            if prefix + name in state:
                state[prefix + name] = value

    def _load(self, index: int, _: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        # The parameters themselves, which loading also writes, are overwritten by the next block.
        for name, value in self.values(index):
            if prefix + name in state:
                value.copy_(state[prefix + name])


def is_moment(value: Any, parameter: Tensor) -> bool:
    """Return whether optimizer state moves with an offloaded weight: matrices of the weight's shape do.

    Tensor subclasses, such as 8-bit states, stay on the device.
    """
    return (
        isinstance(value, Tensor)
        and value.dim() >= 2
        and value.shape == parameter.shape
        and not is_traceable_wrapper_subclass(value)
    )


Layout = list[tuple[nn.Module, str, Tensor, int]]
"""Module, name in it, parameter or buffer of quantised codes as built on meta, and its offset in bytes."""


def _layout(block: nn.Module) -> tuple[Layout, int]:
    layout: Layout = []
    end = 0
    for module in block.modules():
        codes = module._buffers if getattr(module, "num_quantized", 0) else {}
        for name, tensor in (*module._parameters.items(), *codes.items()):
            if tensor is not None:
                layout.append((module, name, tensor, end))
                end += padded(tensor.numel() * tensor.element_size())
    return layout, end
