"""Build a model on ``meta``, change and shard it there, then compute what is left of it on a device.

Inside ``DeferredInit`` each operation on meta tensors is recorded. ``materialise`` allocates the finished
module's tensors on the device, as ``to_empty`` does, then runs the operations. Random numbers are drawn in the
recorded order, so a seed gives the values of a model built on the device. Every other operation runs as early
as it can: a weight is drawn whole, this rank's shard is copied, and the weight is freed before the next one.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_map_only

from trainfit.virtual.cuda.op_kinds import UNWRITTEN, base_name
from trainfit.virtual.trace.tensors import tensors_of

OVERWRITES = frozenset({"normal_", "uniform_", "zero_", "fill_", "copy_"})
"""Operations after which nothing of their first argument's former values is left."""
META = torch.device("meta")
GENERATOR = 0
"""Key of the random generator among the storages that a call uses."""


class Call(NamedTuple):
    """A recorded operation. ``out`` has its results, on meta or, of the host's random draws, on the host."""

    func: Any
    args: Any
    kwargs: dict[str, Any]
    out: Any

    @property
    def draws(self) -> bool:
        return torch.Tag.nondeterministic_seeded in self.func.tags

    @property
    def uses(self) -> set[int]:
        """Storages that it reads or writes, by address, and the generator."""
        found = {address(t) for t in tensors_of((self.args, self.kwargs, self.out))}
        return found | {GENERATOR} if self.draws else found

    @property
    def overwrites(self) -> int | None:
        """The storage of which it reads nothing and writes all."""
        name = self.func._schema.name.rpartition("::")[2]
        if name not in OVERWRITES:
            return None
        target = self.args[0]
        return address(target) if target.nbytes == target.untyped_storage().nbytes() else None


def address(tensor: Tensor) -> int:
    """Return the address of the tensor's storage, which also names one on meta."""
    return tensor.untyped_storage()._cdata


def is_deferred() -> bool:
    """Return whether operations on meta are recorded, so that weights are to be initialised there."""
    return any(isinstance(mode, DeferredInit) for mode in _get_current_dispatch_mode_stack())


class DeferredInit(TorchDispatchMode):
    """Records operations on meta tensors, and on what is drawn on the host, such as PEFT's adapters."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[Call] = []
        self._drawn: set[int] = set()
        """Storages on the host whose values follow from random numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # A DTensor's own operations come back here.
        inputs = tensors_of((args, kwargs))
        is_on_meta = any(t.is_meta for t in inputs) or kwargs.get("device") == META
        if is_on_meta:
            with _disable_current_modes():  # A fake mode would take meta tensors for its own.
                out = func(*args, **kwargs)
        else:
            out = func(*args, **kwargs)
        call = Call(func, args, kwargs, out)
        if not is_on_meta and not call.draws and self._drawn.isdisjoint(map(address, inputs)):
            return out
        if not is_on_meta:
            self._drawn |= {address(t) for t in tensors_of(out)}
        is_view = {address(t) for t in tensors_of(out)} <= {address(t) for t in inputs}
        if base_name(func) not in UNWRITTEN and (func._schema.is_mutable or not is_view):
            self._calls.append(call)
        return out

    @torch.no_grad()
    def materialise(self, module: nn.Module, device: torch.device) -> None:
        """Allocate the module's tensors on the device, and compute their values by the recorded calls."""
        kept = [part for part in map(_local, (*module.parameters(), *module.buffers())) if part.is_meta]
        memory = {address(t): _allocated(t, device) for t in kept}
        _Replay(self._calls, memory, device).run()
        self._calls.clear()

        def real(tensor: Any) -> Any:
            part = _local(tensor)
            if not part.is_meta:
                return tensor
            local = _placed(part, memory[address(part)])
            if part is tensor:
                return local
            return type(tensor)(local, tensor._spec, requires_grad=tensor.requires_grad)

        tied: dict[nn.Parameter, nn.Parameter] = {}
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None and type(parameter) is nn.Parameter and parameter.is_meta:
                    # Of a plain parameter ``_apply`` makes another one in each module that has it.
                    new = tied.setdefault(parameter, nn.Parameter(real(parameter), parameter.requires_grad))
                    part._parameters[name] = new
        module._apply(real)


def _local(tensor: Any) -> Tensor:
    """Return this rank's part of a DTensor, or the tensor."""
    return getattr(tensor, "_local_tensor", tensor)


def _allocated(tensor: Tensor, device: torch.device) -> Tensor:
    """Allocate the storage of a meta tensor, [n]."""
    return torch.empty(tensor.untyped_storage().nbytes() // tensor.itemsize, dtype=tensor.dtype, device=device)


def _placed(tensor: Tensor, memory: Tensor) -> Tensor:
    """Return the view of ``memory`` that has the meta tensor's place in its storage."""
    whole = memory.view(tensor.dtype)
    return whole.as_strided(tensor.shape, tensor.stride(), int(tensor.storage_offset())).detach()


class _Replay:
    """Runs recorded calls on a device."""

    def __init__(self, calls: list[Call], memory: dict[int, Tensor], device: torch.device):
        self._calls, self._memory, self._device = calls, memory, device
        self._kept = frozenset(memory)
        self._queues: dict[int, deque[int]] = {}
        """Storage -> the calls that use it, which run in this order."""
        for number, call in enumerate(calls):
            for used in call.uses:
                self._queues.setdefault(used, deque()).append(number)

    def run(self) -> None:
        """Run all calls; of those that can run the last one, so that whole weights become shards first."""
        ready = [-number for number, call in enumerate(self._calls) if self._is_ready(number, call)]
        heapq.heapify(ready)
        while ready:
            number = -heapq.heappop(ready)
            self._run(self._calls[number])
            following: set[int] = set()
            for used in self._calls[number].uses:
                queue = self._queues[used]
                queue.popleft()
                if not queue or self._calls[queue[0]].overwrites == used:
                    if used not in self._kept:
                        self._memory.pop(used, None)
                following.update(list(queue)[:1])
            for one in following:
                if self._is_ready(one, self._calls[one]):
                    heapq.heappush(ready, -one)

    def _is_ready(self, number: int, call: Call) -> bool:
        return all(self._queues[used][0] == number for used in call.uses)

    def _run(self, call: Call) -> None:
        func, args, kwargs = call.func, *tree_map_only(Tensor, self._real, (call.args, call.kwargs))
        if kwargs.get("device") == META:
            kwargs = {**kwargs, "device": self._device}
        if func is torch.ops.aten._to_copy.default:
            out: Any = args[0].to(**kwargs, copy=True)
        else:
            out = func(*args, **kwargs)
        for old, new in zip(tensors_of(call.out), tensors_of(out), strict=True):
            self._keep(old, new)

    def _real(self, tensor: Tensor) -> Tensor:
        """Return a recorded tensor on the device; tensors on the host are themselves."""
        if not tensor.is_meta:
            return tensor
        if address(tensor) not in self._memory:
            self._memory[address(tensor)] = _allocated(tensor, self._device)
        return _placed(tensor, self._memory[address(tensor)])

    def _keep(self, old: Tensor, new: Tensor) -> None:
        """Store a call's result in the memory of the recorded one."""
        if not old.is_meta:
            if new is not old:
                old.copy_(new)
        elif address(old) not in self._memory:
            size = new.untyped_storage().nbytes() // new.itemsize
            self._memory[address(old)] = new.as_strided((size,), (1,), 0)
        elif address(new) != address(self._memory[address(old)]):
            _placed(old, self._memory[address(old)]).copy_(new)
