"""What optimizers keep of weights that wait on the host, waiting with them. No technique by itself.

Enters: the optimizers' state after an update in backward. Of it, each matrix of its weight's own shape (AdamW's two moments, a
momentum) is a moment: it goes to the host when its block leaves and comes back with the block's backward. Between the two
``optimizer.state`` holds the host's memory, so whoever saves or loads the state does so as ever. What is small (step
counts, Adafactor's rows and columns, all of vectors) stays on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trainfit.offload.blocks import HostBlocks, is_moment
from trainfit.offload.copies import wait
from trainfit.offload.slot_buffer import padded, view


class _Moment(NamedTuple):
    """One state tensor of one weight, and its place."""

    parameter: nn.Parameter
    key: str
    host: Tensor
    start: int


class HostMoments:
    """The moments of the weights of ``hosted``.

    Args:
        optimizers: all that train, once the step is complete.
    """

    def __init__(self, hosted: HostBlocks, optimizers: Callable[[], list[torch.optim.Optimizer]]):
        self._hosted, self._find_optimizers = hosted, optimizers
        self._ring = hosted.moments
        self._moments: dict[int, list[_Moment]] = {}
        self._optimizers: dict[nn.Parameter, torch.optim.Optimizer] = {}

    def arrive(self, index: int, then: int | None) -> None:
        """Block ``index``'s weights may be updated from here on; what block ``then`` needs for that is on its way."""
        self._adopt(index)
        if index in self._ring:
            self._ring.arrive(index, then, to_change=True)
        for moment in self._moments.get(index, ()):
            self._state(moment.parameter)[moment.key] = self._room(index, moment)

    def leave(self, index: int) -> None:
        """Block ``index`` has been updated."""
        for moment in self._moments.get(index, ()):
            state = self._state(moment.parameter)
            value, room = state[moment.key], self._room(index, moment)
            assert isinstance(value, Tensor)
            if value.untyped_storage()._cdata != room.untyped_storage()._cdata:
                room.copy_(value)  # An optimizer may make its state anew.
            state[moment.key] = moment.host
        if index in self._ring:
            self._ring.leave(index, changed=True)
        self._adopt(index)

    def _adopt(self, index: int) -> None:
        """Give moments that are not on the host yet (after a first update, or loaded) their place there."""
        found = list(self._found(index))
        known = self._moments.get(index, [])
        if [(p, k) for p, k, _ in found] == [(m.parameter, m.key) for m in known] and all(
            value is moment.host for (_, _, value), moment in zip(found, known, strict=True)
        ):
            return
        starts, end = [], 0
        for _, _, value in found:
            starts.append(end)
            end += padded(value.numel() * value.element_size())
        self._hosted.copy_streams.settle()
        host = self._ring.invite(index, end)
        self._moments[index] = []
        for (parameter, key, value), start in zip(found, starts, strict=True):
            moment = _Moment(parameter, key, view(host, start, value), start)
            self._take_over(index, value, moment.host)
            self._state(parameter)[key] = moment.host
            self._moments[index].append(moment)

    def _room(self, index: int, moment: _Moment) -> Tensor:
        return view(self._ring.room(index), moment.start, moment.host)

    def _take_over(self, index: int, value: Tensor, host: Tensor) -> None:
        """The host's memory gets a value that has been on the device, or on the host elsewhere."""
        if value.device == host.device:
            host.copy_(value)
        else:
            copy_streams = self._hosted.copy_streams
            # Once a moment and run: the computation waits, so the device's memory can be given up, and whoever reads
            # the host's comes after it.
            event = copy_streams.to_host.copy(host, value, copy_streams.now())
            wait(event)
            self._ring.wrote(index, event)

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
