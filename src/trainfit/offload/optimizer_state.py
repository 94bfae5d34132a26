"""Offloading of the optimizer state: of weights that live on the host, or of all weights.

State matrices of their weight's shape (AdamW's two moments, master weights, a momentum) are on the device
while their part of the weights is updated. In between ``optimizer.state`` holds the host tensors, so state is
saved and loaded as usual. Step counts, Adafactor's rows and columns and the state of vectors stay on the
device.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trainfit.offload.blocks import is_moment
from trainfit.offload.copies import CopyStreams, wait
from trainfit.offload.device_ring import DeviceRing, padded, view

LARGE = 2
"""Least ratio of a large part's size to the median part's."""


class _Moment(NamedTuple):
    """One state tensor of one weight, its host memory and its byte offset in the block's buffer."""

    parameter: nn.Parameter
    key: str
    host: Tensor
    start: int


class HostMoments:
    """The optimizer state of the weights in numbered parts, such as decoder blocks.

    Args:
        parameters: Returns the weights of a part.
        optimizers: Returns all optimizers, once the step is assembled.
    """

    def __init__(
        self,
        parameters: Callable[[int], Sequence[nn.Parameter]],
        ring: DeviceRing,
        copy_streams: CopyStreams,
        optimizers: Callable[[], list[torch.optim.Optimizer]],
    ):
        self._parameters, self._ring, self.copy_streams = parameters, ring, copy_streams
        self._find_optimizers = optimizers
        self._moments: dict[int, list[_Moment]] = {}
        self._optimizers: dict[nn.Parameter, torch.optim.Optimizer] = {}

    def buffers(self) -> list[Tensor]:
        """Return the device memory that holds state while it is updated."""
        return self._ring.buffers()

    def acquire(self, index: int, then: int | None) -> None:
        """Wait until part ``index``'s state can be updated; start to copy in that of part ``then``."""
        self._adopt(index)
        if index in self._ring:
            self._ring.acquire(index, then, to_write=True)
        for moment in self._moments.get(index, ()):
            self._state(moment.parameter)[moment.key] = self._on_device(index, moment)

    def release(self, index: int) -> None:
        """Copy part ``index``'s updated state back to the host."""
        for moment in self._moments.get(index, ()):
            state = self._state(moment.parameter)
            value, target = state[moment.key], self._on_device(index, moment)
            assert isinstance(value, Tensor)
            if value.untyped_storage()._cdata != target.untyped_storage()._cdata:
                target.copy_(value)  # An optimizer may replace its state.
            state[moment.key] = moment.host
        if index in self._ring:
            self._ring.release(index, changed=True)
        self._adopt(index)

    def _adopt(self, index: int) -> None:
        """Move new state to the host: after a first update, or after loading."""
        found = list(self._found(index))
        known = [
            (id(moment.parameter), moment.key, id(moment.host)) for moment in self._moments.get(index, [])
        ]
        if [(id(parameter), key, id(value)) for parameter, key, value in found] == known:
            return
        starts = [0]
        for _, _, value in found:
            starts.append(starts[-1] + padded(value.numel() * value.element_size()))
        streams = self.copy_streams
        streams.synchronize()
        host = self._ring.add(index, starts[-1])
        self._moments[index] = []
        for (parameter, key, value), start in zip(found, starts, strict=False):
            moment = _Moment(parameter, key, view(host, start, value), start)
            if value.device == moment.host.device:
                moment.host.copy_(value)  # From other host memory.
            else:
                # Once per state tensor and run: the computation waits, so the device memory can be freed.
                event = streams.to_host.copy(moment.host, value, streams.now())
                wait(event)
                self._ring.record_write(index, event)
            self._state(parameter)[key] = moment.host
            self._moments[index].append(moment)

    def _on_device(self, index: int, moment: _Moment) -> Tensor:
        return view(self._ring.buffer(index), moment.start, moment.host)

    def _found(self, index: int) -> Iterator[tuple[nn.Parameter, str, Tensor]]:
        for parameter in self._parameters(index):
            for key, value in self._state(parameter).items() if parameter.requires_grad else ():
                if is_moment(value, parameter):
                    assert isinstance(value, Tensor)
                    yield parameter, key, value

    def _state(self, parameter: nn.Parameter) -> dict[str, object]:
        if not self._optimizers:
            self._optimizers = {
                p: optimizer
                for optimizer in self._find_optimizers()
                for group in optimizer.param_groups
                for p in group["params"]
            }
        return self._optimizers[parameter].state[parameter]


def streamed(
    optimizers: Sequence[torch.optim.Optimizer], device: torch.device, *, num_buffers: int, last_first: bool
) -> HostMoments:
    """Keep the optimizers' state on the host, and bring each one's to the device while it steps.

    Args:
        num_buffers: Optimizers whose state is on the device at once.
        last_first: They step from the last to the first.

    Returns:
        The state, one part for each optimizer.
    """
    copy_streams = CopyStreams(device)
    parts = [parameters_of(one) for one in optimizers]
    sizes = [sum(one.numel() for one in part if one.dim() > 1) for part in parts]
    ring = DeviceRing(copy_streams, num_buffers, slots=slots_of(sizes, num_buffers))
    moments = HostMoments(parts.__getitem__, ring, copy_streams, lambda: list(optimizers))
    for index, optimizer in enumerate(optimizers):
        following = index - 1 if last_first else index + 1
        optimizer.register_step_pre_hook(partial(_acquire, moments, index, following))
        optimizer.register_step_post_hook(partial(_release, moments, index))
    return moments


def slots_of(sizes: Sequence[int], num_slots: int) -> list[int]:
    """Return the buffer of each part in turn, so that the large parts share the first.

    Example with three: an embedding of 8, four blocks of 2 and a head of 8. In turn they would use the
    buffers 0 1 2 0 1 2, of 8, 2 and 8. With 0 1 2 0 1 0 the head shares the embedding's, and the others hold
    2 each. Where a buffer comes back after two parts, here 0, its copy to the host may have to be waited for.

    Args:
        sizes: Elements of each part's state; 0: it has none on the host.
    """
    held = sorted(filter(None, sizes))
    least = LARGE * held[len(held) // 2] if held else 0
    found: list[int] = []
    last = -1
    for index, size in enumerate(sizes):
        following = next(filter(None, sizes[index + 1 :]), 0)
        slot = (last + 1) % num_slots
        if size > least and last != 0:
            slot = 0
        elif slot == 0 and last > 0 and following > least:
            slot = 1  # The large one after it is copied ahead.
        found.append(slot)
        last = slot if size else last
    return found


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the weights that an optimizer updates."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _acquire(moments: HostMoments, index: int, following: int, *_: object) -> None:
    moments.acquire(index, following)


def _release(moments: HostMoments, index: int, *_: object) -> None:
    moments.release(index)
