"""Offloading of the optimizer state of weights that live on the host, for optimizers that step in backward.

State matrices of their weight's shape (AdamW's two moments, a momentum) move to the host when their block is
released and back for the block's backward. In between ``optimizer.state`` holds the host tensors, so state is
saved and loaded as usual. Step counts, Adafactor's rows and columns and the state of vectors stay on the
device.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trainfit.offload.blocks import HostBlocks, is_moment
from trainfit.offload.copies import wait
from trainfit.offload.device_ring import padded, view


class _Moment(NamedTuple):
    """One state tensor of one weight, its host memory and its byte offset in the block's buffer."""

    parameter: nn.Parameter
    key: str
    host: Tensor
    start: int


class HostMoments:
    """The optimizer state of the weights of ``hosted``.

    Args:
        optimizers: Returns all optimizers, once the step is assembled.
    """

    def __init__(self, hosted: HostBlocks, optimizers: Callable[[], list[torch.optim.Optimizer]]):
        self._hosted, self._find_optimizers = hosted, optimizers
        self._ring = hosted.moments
        self._moments: dict[int, list[_Moment]] = {}
        self._optimizers: dict[nn.Parameter, torch.optim.Optimizer] = {}

    def acquire(self, index: int, then: int | None) -> None:
        """Wait until block ``index``'s state can be updated; start to copy in that of block ``then``."""
        self._adopt(index)
        if index in self._ring:
            self._ring.acquire(index, then, to_write=True)
        for moment in self._moments.get(index, ()):
            self._state(moment.parameter)[moment.key] = self._on_device(index, moment)

    def release(self, index: int) -> None:
        """Copy block ``index``'s updated state back to the host."""
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
        streams = self._hosted.copy_streams
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
        for parameter in self._hosted.parameters(index):
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
