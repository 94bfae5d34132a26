"""Build a model on ``meta``, change and shard it there, then compute what is left of it on a device.

Inside ``DeferredInit`` each operation on meta tensors is recorded. ``materialise`` allocates the finished
module's tensors on the device, as ``to_empty`` does, then runs the operations. Random numbers are drawn in
the recorded order, so a seed gives the values of a model built on the device. Every other operation runs as
early as it can: a weight is drawn whole, this rank's shard is copied, and the weight is freed.

A weight may also be read from a file (``DeferredInit.read``). Where only a part of it is copied, such as this
rank's rows, only that part is read.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from trainfit.virtual.cuda.op_kinds import UNWRITTEN, base_name
from trainfit.virtual.trace.exclusive import replaced
from trainfit.virtual.trace.tensors import tensors_of

OVERWRITES = frozenset({"normal_", "uniform_", "zero_", "fill_", "copy_", "_no_grad_trunc_normal_"})
"""Operations after which nothing of their first argument's former values is left."""
FILLS = OVERWRITES - {"copy_", "_no_grad_trunc_normal_"}
"""Those that a meta tensor need not run: they have no other inputs whose shapes they check."""
META = torch.device("meta")
GENERATOR = 0
"""Key of the random generator among the storages that a call uses."""


@dataclass(frozen=True, eq=False)
class Place:
    """A meta tensor's place in its storage, which is kept alive so that no other gets its address."""

    storage: torch.UntypedStorage
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @property
    def address(self) -> int:
        return self.storage._cdata

    @property
    def size(self) -> int:
        """Elements of the whole storage."""
        return self.storage.nbytes() // self.dtype.itemsize

    def allocated(self, device: torch.device) -> Tensor:
        """Allocate the storage, [size]."""
        return torch.empty(self.size, dtype=self.dtype, device=device)

    def of(self, memory: Tensor) -> Tensor:
        """Return the tensor at this place of ``memory``."""
        typed = memory if memory.dtype == self.dtype else memory.view(self.dtype)
        return typed.as_strided(self.shape, self.stride, self.offset)


def place(tensor: Tensor) -> Any:
    """Return a meta tensor's place; another tensor itself."""
    if not tensor.is_meta:
        return tensor
    offset = int(tensor.storage_offset())
    return Place(tensor.untyped_storage(), tensor.dtype, tensor.shape, tensor.stride(), offset)


ReadPart = Callable[[tuple[slice, ...], torch.device], Tensor]
"""Returns the part of a tensor that a range of each dimension is, in any dtype.

What is computed from a file is computed on the device that is given; what is only read may be on the host.
"""


@dataclass(frozen=True, eq=False)
class FileRead:
    """A recorded read of a whole tensor, which ``_Replay`` runs in parts where it can."""

    shape: torch.Size
    dtype: torch.dtype
    read: ReadPart

    def whole(self, device: torch.device) -> Tensor:
        """Return all of it."""
        return self.read(tuple(slice(0, size) for size in self.shape), device)

    def part(self, at: Place, device: torch.device) -> Tensor | None:
        """Return the part that a view is; None: it is no range of each dimension, or it is all."""
        strides = torch.empty(self.shape, device=META).stride()
        if at.shape == self.shape or (at.dtype, at.stride) != (self.dtype, strides):
            return None
        ranges, rest = [], at.offset
        for size, stride in zip(at.shape, strides, strict=True):
            start, rest = divmod(rest, stride)
            ranges.append(slice(start, start + size))
        return self.read(tuple(ranges), device)


class Call(NamedTuple):
    """A recorded operation; in arguments and results, meta tensors are replaced by their ``Place``."""

    func: Any
    args: Any
    kwargs: dict[str, Any]
    results: list[Any]
    uses: frozenset[int]
    """Addresses of the storages that it reads or writes, and GENERATOR if it draws random numbers."""
    overwrites: int | None
    """Address of the storage of which it reads nothing and writes all."""


def address(tensor: Tensor) -> int:
    """Return the address of the tensor's storage, which also identifies one on meta."""
    return tensor.untyped_storage()._cdata


def deferred() -> DeferredInit | None:
    """Return what records operations on meta; None: nothing does."""
    modes = _get_current_dispatch_mode_stack()
    return next((mode for mode in modes if isinstance(mode, DeferredInit)), None)


def is_deferred() -> bool:
    """Return whether operations on meta are recorded, so that weights are to be initialised there."""
    return deferred() is not None


class DeferredInit(TorchDispatchMode):
    """Records operations on meta tensors, and on what is drawn elsewhere, such as PEFT's adapters."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[Call] = []
        self._patches = ExitStack()
        self._drawn: set[int] = set()
        """Storages that are not on meta and whose values follow from random numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # A DTensor's own operations come back here.
        inputs = tensors_of((args, kwargs))
        on_meta = any(t.is_meta for t in inputs) or kwargs.get("device") == META
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if on_meta and len(inputs) == 1 and func.__name__.partition(".")[0] in FILLS:
            out = args[0]
        elif on_meta:
            with _disable_current_modes():  # A fake mode would take meta tensors for its own.
                out = func(*args, **kwargs)
        else:
            out = func(*args, **kwargs)
        used = {address(t) for t in inputs}
        if not on_meta and not draws and self._drawn.isdisjoint(used):
            return out
        if not on_meta:
            self._drawn |= {address(t) for t in tensors_of(out)}
        is_written = func._schema.is_mutable or not used.issuperset(map(address, tensors_of(out)))
        if is_written and base_name(func) not in UNWRITTEN:
            self._record(func, args, kwargs, out, used, draws=draws)
        return out

    def __enter__(self) -> Self:
        original: Any = nn.init._no_grad_trunc_normal_  # It draws again as often as values need.

        def truncated(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if not tensor.is_meta:
                return original(tensor, *args, **kwargs)
            self._record(original, (tensor, *args), kwargs, tensor, {address(tensor)}, draws=True)
            return tensor

        self._patches.enter_context(replaced(nn.init, original.__name__, truncated))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def _record(
        self, func: Any, args: Any, kwargs: dict[str, Any], out: Any, used: set[int], *, draws: bool
    ) -> None:
        results = tensors_of(out)
        uses = used.union(map(address, results), [GENERATOR] if draws else [])
        args, kwargs = _changed(Tensor, place, args), _changed(Tensor, place, kwargs)
        overwrites = _overwritten(func, args)
        self._calls.append(Call(func, args, kwargs, [place(t) for t in results], frozenset(uses), overwrites))

    def forget(self, tensors: Iterable[Tensor]) -> None:
        """Drop the operations that only write these tensors, which the model no longer has."""
        dropped = {GENERATOR, *map(address, tensors)}
        self._calls = [call for call in self._calls if not call.uses <= dropped]

    def read(self, tensor: Tensor, read: ReadPart) -> None:
        """Record that a contiguous tensor on meta is read from a file, in place of its values so far."""
        read_whole, used = FileRead(tensor.shape, tensor.dtype, read), address(tensor)
        self._calls.append(Call(read_whole, (place(tensor),), {}, [], frozenset([used]), used))

    def source_of(self, tensor: Tensor) -> ReadPart | None:
        """Return how a tensor on meta is read, if nothing is computed of it before; None: it is not."""
        last = next((call for call in reversed(self._calls) if address(tensor) in call.uses), None)
        if last is None or not isinstance(last.func, FileRead) or last.func.shape != tensor.shape:
            return None
        return last.func.read

    @torch.no_grad()
    def materialise(self, module: nn.Module, device: torch.device) -> None:
        """Allocate the module's tensors on the device, and compute their values by the recorded calls."""
        found = map(place, map(_local, (*module.parameters(), *module.buffers())))
        kept = {one.address: one for one in found if isinstance(one, Place)}
        memory = {number: one.allocated(device) for number, one in kept.items()}
        _Replay(self._calls, memory, device).run()
        self._calls.clear()

        def real(tensor: Any) -> Any:
            at = place(_local(tensor))
            if not isinstance(at, Place):
                return tensor
            local = at.of(memory[at.address]).detach()
            if _local(tensor) is tensor:
                return local
            return type(tensor)(local, tensor._spec, requires_grad=tensor.requires_grad)

        tied: dict[nn.Parameter, nn.Parameter] = {}
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if type(parameter) is nn.Parameter and parameter.is_meta:
                    # ``_apply`` would make another one in each module that has it.
                    if parameter not in tied:
                        tied[parameter] = nn.Parameter(real(parameter), parameter.requires_grad)
                    part._parameters[name] = tied[parameter]
        module._apply(real)


def _is_in_place(func: Any) -> bool:
    """Return whether a function may write its first argument."""
    return not isinstance(func, torch._ops.OpOverload) or func._schema.is_mutable


def _overwritten(func: Any, args: Any) -> int | None:
    """Return the storage of which the operation reads nothing and writes all."""
    if func.__name__.partition(".")[0] not in OVERWRITES or not isinstance(args[0], Place):
        return None
    return args[0].address if args[0].shape.numel() == args[0].size else None


def _changed(kind: type, change: Any, value: Any) -> Any:
    """Return arguments with those of a kind changed, as ``tree_map_only`` does in four times the time."""
    if isinstance(value, kind):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)([_changed(kind, change, each) for each in value])
    if type(value) is dict:
        return {key: _changed(kind, change, each) for key, each in value.items()}
    return value


def _local(tensor: Any) -> Tensor:
    """Return this rank's part of a DTensor, or the tensor."""
    return getattr(tensor, "_local_tensor", tensor)


class _Replay:
    """Runs recorded calls on a device."""

    def __init__(self, calls: list[Call], memory: dict[int, Tensor], device: torch.device):
        self._calls, self._memory, self._device = calls, memory, device
        self._kept = frozenset(memory)
        self._unread: dict[int, FileRead] = {}
        """Storage that is not allocated -> the file's tensor that it would hold."""
        self._queues: dict[int, deque[int]] = {}
        """Storage -> the calls that use it, which run in this order."""
        for number, call in enumerate(calls):
            for used in call.uses:
                self._queues.setdefault(used, deque()).append(number)

    def run(self) -> None:
        """Run all calls: draws after all others, these from the end, so that weights become shards first."""
        ready: list[tuple[bool, int]] = []
        self._push(ready, range(len(self._calls)))
        while ready:
            number = -heapq.heappop(ready)[1]
            call = self._calls[number]
            self._run(call)
            following: set[int] = set()
            for used in call.uses:
                queue = self._queues[used]
                queue.popleft()
                is_dead = not queue or self._calls[queue[0]].overwrites == used
                if is_dead and used not in self._kept:
                    self._memory.pop(used, None)
                    self._unread.pop(used, None)
                following.update(list(queue)[:1])
            self._push(ready, following)

    def _push(self, ready: list[tuple[bool, int]], numbers: Iterable[int]) -> None:
        """Add those calls that are first in all their queues."""
        for number in numbers:
            uses = self._calls[number].uses
            if all(self._queues[used][0] == number for used in uses):
                heapq.heappush(ready, (GENERATOR in uses, -number))

    def _run(self, call: Call) -> None:
        if isinstance(call.func, FileRead):
            at = call.args[0]
            if at.address in self._memory:
                at.of(self._memory[at.address]).copy_(call.func.whole(self._device))
            else:
                self._unread[at.address] = call.func
            return
        if self._unread and _is_in_place(call.func):
            self._read_whole(call.args[:1])  # What an operation in place writes.
        elif self._unread and base_name(call.func).startswith("new_"):
            at = call.args[0]  # FSDP2's shard takes dtype and device of it alone.
            call = call._replace(args=(torch.empty(0, dtype=at.dtype, device=self._device), *call.args[1:]))
        func, args, kwargs = call.func, *_changed(Place, self._real, (call.args, call.kwargs))
        if kwargs.get("device") == META:
            kwargs = {**kwargs, "device": self._device}
        if func is torch.ops.aten._to_copy.default:
            # A virtual GPU sees by this call that a tensor moves from the host.
            out: Any = args[0].to(device=kwargs.get("device"), dtype=kwargs.get("dtype"), copy=True)
        else:
            out = func(*args, **kwargs)
        for old, new in zip(call.results, tensors_of(out), strict=True):
            self._store(old, new)

    def _read_whole(self, args: Any) -> None:
        for at in args:
            if isinstance(at, Place) and (unread := self._unread.pop(at.address, None)) is not None:
                memory = self._memory[at.address] = at.allocated(self._device)
                memory.view(unread.shape).copy_(unread.whole(self._device))

    def _real(self, at: Place) -> Tensor:
        if (unread := self._unread.get(at.address)) is not None:
            part = unread.part(at, self._device)
            if part is not None:
                return part.to(self._device, at.dtype)
            self._read_whole([at])
        if at.address not in self._memory:
            self._memory[at.address] = at.allocated(self._device)
        return at.of(self._memory[at.address])

    def _store(self, old: Any, new: Tensor) -> None:
        """Store a result where the recorded one is."""
        if isinstance(old, Tensor):
            if new is not old:
                old.copy_(new)
        elif old.address not in self._memory:
            self._memory[old.address] = new.as_strided((old.size,), (1,), 0)
        elif address(new) != address(self._memory[old.address]):
            old.of(self._memory[old.address]).copy_(new)
