"""The tracer: sees every operation of a step on fake tensors and writes the ledger.

Enters: operations below autograd (a TorchDispatchMode). Leaves: allocations, frees and operations with their
module, phase and group of layers. One weak reference per storage tells when it is freed, so autograd's own order
of frees is what is recorded.
"""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainfit.virtual.fake_run import READS_VALUE, read, run
from trainfit.virtual.flops import count
from trainfit.virtual.gradient_sums import as_the_engine_does, held_by_engine_alone
from trainfit.virtual.host import Residence, carry_values, is_host, on_host
from trainfit.virtual.ledger import (
    ALLOCATE,
    FREE,
    MIDDLE,
    NO_LAYER,
    Event,
    Ledger,
    Op,
    Segment,
    Storage,
    part_of,
)
from trainfit.virtual.op_kinds import COPY_DIRECTIONS
from trainfit.virtual.places import NOWHERE, Place, Places
from trainfit.virtual.rehearsed import Rehearsal, rehearse
from trainfit.virtual.temporaries import GpuTraits, as_allocated, output_bytes, temporaries
from trainfit.virtual.traffic import bytes_moved
from trainfit.virtual.workspaces import Workspaces

aten = torch.ops.aten
NESTED = (list, tuple, dict)
LEAVES = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout})
"""What most arguments are that hold no tensor."""
LIFTS = {aten.lift_fresh.default, aten.lift_fresh_copy.default}
"""What ``torch.tensor`` ends with: its input is a real tensor whichever side the result is on."""
CONVERSIONS = {aten._to_copy.default, aten.clone.default}
DEVICE = torch.ops.prim.device.default
"""Asked of every fake tensor by most of PyTorch's Python: more than half of what comes here."""
UNKNOWN = -1
"""In place of a ledger index: not a device storage."""


class Tracer(TorchDispatchMode):
    """Records what runs while it is entered. Enter it inside a FakeTensorMode and a ``Places``.

    Args:
        gpu: the CUDA GPU whose kernels' scratch and workspaces count; None for a CPU, whose scratch is not seen.
    """

    def __init__(self, gpu: GpuTraits | None, places: Places, residence: Residence):
        super().__init__()
        self.residence = residence
        self.ledger = Ledger()
        self.gpu, self.places = gpu, places
        self.places.on_recomputed = self._keep_recomputed
        self.workspaces = Workspaces(gpu) if gpu else None
        self._live: dict[int, int] = {}
        """Address of a live storage -> its index in the ledger."""
        self._refs: dict[int, Any] = {}
        self._owners: dict[int, Place] = {}
        """Index of a storage -> place of the parameter it belongs to."""
        self._made_from: dict[int, int] = {}
        """Index of a storage -> that of what it was converted from while the model was built."""
        self._listed: set[int] = set()
        """Storages that an operation over a list of parameters made."""
        self._categories: dict[int, str] = {}
        self._born: list[int] = []
        """Index of a storage -> the segment it was allocated in."""
        self._seen: dict[tuple[int, int, str], int] = {}
        self._unknown: set[str] = set()
        self._host: dict[int, tuple[Any, int]] = {}
        """Host memory that is copied from or to, by address: storages on ``meta``, with the group that first did."""
        self._recomputed: list[int] = []
        self._sticky = NO_LAYER
        held_by_engine_alone()
        self.begin("init", "init")

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """torch.compile compiles inside this mode; the mode sees what the compiled code runs."""
        return True

    # -- what the step tells ------------------------------------------------------------------------------------

    def begin(self, step: str, phase: str) -> None:
        """A phase of a step begins; what a forward leaves alive for its backward are activations."""
        if phase == "backward":
            forward = len(self.ledger.segments) - 1
            self._categorise("activations", (i for i in self.live_indices() if self._born[i] == forward))
        self.ledger.segments.append(Segment(step, phase))
        self._segment = len(self.ledger.segments) - 1
        self._sticky, self._last_owner = NO_LAYER, NOWHERE
        self.places.phase = phase

    def own(self, tensor: Tensor, category: str, place: Place) -> None:
        """The tensor's storage is of this category and belongs to the parameter at this place.

        What parameters of several groups of layers share belongs to none.
        """
        index = self._live.get(tensor.untyped_storage()._cdata, UNKNOWN)
        if index != UNKNOWN:
            if category == "weights" and self._owners.get(index, place).group != place.group:
                place = NOWHERE
            self._categories[index] = category
            self._owners[index] = place

    def own_host(self, memory: Tensor, place: Place) -> None:
        """The host memory belongs to the parameter at this place."""
        storage = memory.untyped_storage()
        self._host[storage._cdata] = storage, place.group

    def forget(self, tensors: Iterable[Tensor]) -> None:
        """These parameters were cut out of the model: strike them from the ledger, frees included."""
        dropped = {self._live.pop(t.untyped_storage()._cdata) for t in tensors if self.index_of(t) != UNKNOWN}
        self.ledger.events = [event for event in self.ledger.events if event.storage not in dropped]
        self._dropped = dropped

    def index_of(self, tensor: Tensor) -> int:
        """Index of the tensor's storage in the ledger; UNKNOWN if it is not followed."""
        return self._live.get(tensor.untyped_storage()._cdata, UNKNOWN)

    def live_indices(self) -> list[int]:
        """Indices of the storages alive now."""
        return list(self._live.values())

    def built(self) -> None:
        """The model is complete: give what was allocated for it, and what that was made from, its owners' groups."""
        storages = self.ledger.storages
        owned = dict(self._owners)
        for index, place in owned.items():
            while index != UNKNOWN and owned.get(index, place) == place:
                self._owners[index] = place
                slot = f"weights/{place.slot}"
                storages[index] = storages[index]._replace(
                    group=place.group, slot=f"{slot}/{self._count(place.group, slot)}"
                )
                index = self._made_from.pop(index, UNKNOWN)
        self.ledger.events = [
            event._replace(group=storages[event.storage].group) for event in self.ledger.events
        ]

    def finish(self) -> Ledger:
        """The ledger, with the categories that only the whole run tells."""
        storages = self.ledger.storages
        for index, category in self._categories.items():
            storages[index] = storages[index]._replace(category=category)
            if category == "optimizer":
                # A state tensor made from nothing (a step counter) is its parameter's all the same.
                storages[index] = storages[index]._replace(group=self._owners[index].group)
        self.ledger.events = [
            e._replace(group=storages[e.storage].group) if storages[e.storage].category == "optimizer" else e
            for e in self.ledger.events
        ]
        self.ledger.ops_without_flops = tuple(sorted(self._unknown))
        self.ledger.pinned = tuple((storage.nbytes(), group) for storage, group in self._host.values())
        finished, self.ledger = self.ledger, Ledger()
        self._live.clear()  # What is freed from here on is the end of the trace, not of the run.
        return finished

    def _categorise(self, category: str, indices: Iterable[int]) -> None:
        for index in indices:
            self._categories.setdefault(index, category)

    def _keep_recomputed(self) -> None:
        live = set(self.live_indices())
        self._categorise("activations", (i for i in self._recomputed if i in live))
        self._recomputed.clear()

    def launched(self, name: str, num_bytes: int, dtype: str) -> None:
        """A kernel that is no operation of PyTorch's ran: compiled code's own."""
        place = self.places.current()
        self._sticky = place.group
        self.ledger.ops.append(
            Op(name, place.module, self._segment, place.group, 0, 0, 0, 0, num_bytes, dtype)
        )

    def tuned(self, scratch: Sequence[tuple[int, ...]]) -> None:
        """The kernel that launches now tried its configurations first: each tuple was allocated and freed together.

        That happens once, not in each layer: it belongs to none.
        """
        place = self.places.current()
        if part_of(place.group) == MIDDLE:
            return  # Equal layers are counted as one here; the first and the last one launch the same kernels first.
        for sizes in scratch:
            self._add_scratch(sizes, len(self.ledger.ops) - 1, place._replace(group=NO_LAYER), "tuning")

    # -- what PyTorch tells -------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and type(args[0]) is FakeTensor and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device  # As FakeTensor itself answers, on a shorter way.
        kwargs = kwargs or {}
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            # A wrapper around tensors (torchao's): its own rule runs first, and what that does comes back here.
            return NotImplemented
        tensors = _tensors((args, kwargs))
        if self._stays_on_host(func, tensors):
            out = on_host(func, args, kwargs)
            if self.gpu is None:
                self._record(func, args, kwargs, out)  # A CPU's own memory is the host's.
            return out
        if func in READS_VALUE:
            return read(args[0])
        func = as_the_engine_does(func, args, kwargs)
        rehearsed = rehearse(func, args, kwargs, self.gpu.compute_capability) if self.gpu else None
        if rehearsed is not None:
            self._record(func, args, kwargs, *rehearsed)
            return rehearsed[0]
        out = run(func, args, kwargs)
        carry_values(func, args, kwargs, out)
        self._record(func, args, kwargs, out)
        return out

    def _stays_on_host(self, func: Any, tensors: list[Tensor]) -> bool:
        if self.residence.is_moving:
            return False
        if not tensors or func in LIFTS:
            return self.residence.on_host
        return all(is_host(t) for t in tensors)

    def _record(
        self, func: Any, args: Any, kwargs: Any, out: Any, rehearsal: Rehearsal | None = None
    ) -> None:
        outputs = _tensors(out)
        fresh = [(n, t) for n, t in enumerate(outputs) if self._is_fresh(t)]
        if not fresh and not func._schema.is_mutable:
            return
        place = self.places.current()
        owners = self._owners_of(args) if place.owned else []
        if len({owner.group for owner in owners}) == 1:
            place = self._last_owner = owners[0]
        self._sticky = place.group
        op = self._add_ops(func, args, kwargs, out, place, owners)
        if self.ledger.ops[op].name in COPY_DIRECTIONS:
            for t in args:
                if t.is_meta:
                    self._host.setdefault(t.untyped_storage()._cdata, (t.untyped_storage(), place.group))
        if rehearsal is not None:
            self._replay(rehearsal, fresh, op, place, str(func))
            return
        sizes = output_bytes(func, args, kwargs, out) if self.gpu else {}
        for n, t in as_allocated(func, fresh) if self.gpu else fresh:
            owner = owners[n] if len(owners) == len(outputs) else place
            index = self._allocate(t, "list" if len(owners) > 1 else str(n), op, owner, sizes.get(n))
            if owners:
                self._owners[index] = owner
            if len(owners) > 1:
                self._listed.add(index)
            if self.places.phase == "init" and func in CONVERSIONS:
                self._made_from[index] = self.index_of(args[0])
        for num_bytes in (
            self.workspaces.first_use(func, args, kwargs, place.in_autograd) if self.workspaces else ()
        ):
            self._add_storage(num_bytes, -1, "workspace", NO_LAYER, "workspace")
        if self.gpu:
            self._add_scratch(temporaries(func, args, kwargs, out, gpu=self.gpu), op, place, str(func))

    def _replay(
        self, rehearsal: Rehearsal, fresh: list[tuple[int, Tensor]], op: int, place: Place, name: str
    ) -> None:
        """Allocations and frees in the order of the rehearsal; what it did not give back is scratch."""
        results = {rehearsal.number_of(t): (n, t) for n, t in fresh}
        scratch: dict[int, int] = {}
        for number, is_free in rehearsal.changes:
            if number in results:
                n, t = results[number]
                self._allocate(t, str(n), op, place, None)
            elif is_free and number in scratch:
                self.ledger.events.append(Event(FREE, scratch[number], place.group, self._segment))
            elif rehearsal.num_bytes[number]:
                slot = f"{place.slot}/{name}/scratch"
                scratch[number] = self._add_storage(
                    rehearsal.num_bytes[number], op, slot, place.group, "temporary"
                )

    def _is_fresh(self, t: Tensor) -> bool:
        return t.device.type != "meta" and t.untyped_storage()._cdata not in self._live

    def _owners_of(self, args: Any) -> list[Place]:
        """Parameters that the first tensor argument belongs to; of a list of tensors, each one's.

        What belongs to none (a state tensor being made) is taken for the parameter last worked on.
        """
        for arg in args:
            tensors = _tensors(arg)
            if tensors:
                return [self._owners.get(self.index_of(t), self._last_owner) for t in tensors]
        return [self._last_owner]

    def _add_ops(self, func: Any, args: Any, kwargs: Any, out: Any, place: Place, owners: list[Place]) -> int:
        """One entry an operation; a list operation over several groups' parameters gets one entry a group."""
        phase = self.places.phase
        counted = count(func, args, kwargs, out)
        if counted is None:
            self._unknown.add(str(func))
        num_bytes = bytes_moved(func, args, kwargs, out)
        full, causal = (counted.full, counted.causal) if counted else (0, 0)
        # Neither recomputation nor an update (Muon makes products of its own) is what the model's mathematics needs.
        extra = place.recomputing or place.updating
        needed = counted is not None and phase in ("forward", "backward") and not extra
        model, model_full = (counted.model_causal, counted.model_full) if counted and needed else (0, 0)
        dtype = _dtype(args, out)
        groups = {owner.group for owner in owners}
        if len(groups) <= 1:
            self.ledger.ops.append(
                Op(
                    str(func),
                    place.module,
                    self._segment,
                    place.group,
                    full,
                    causal,
                    model,
                    model_full,
                    num_bytes,
                    dtype,
                    is_update=place.updating,
                )
            )
            return len(self.ledger.ops) - 1
        # Of what belongs to nobody (a loss scale) the first share has all.
        shared = bytes_moved(func, *(_of_group(part, owners, None) for part in (args, kwargs, out)))
        for number, group in enumerate(sorted(groups)):
            share = bytes_moved(func, *(_of_group(part, owners, group) for part in (args, kwargs, out)))
            num_bytes = share - (shared if number else 0)
            self.ledger.ops.append(
                Op(
                    str(func),
                    "",
                    self._segment,
                    group,
                    0,
                    0,
                    0,
                    0,
                    num_bytes,
                    dtype,
                    int(number == 0),
                    place.updating,
                )
            )
        return len(self.ledger.ops) - 1

    def _allocate(self, t: Tensor, label: str, op: int, place: Place, num_bytes: int | None) -> int:
        storage = t.untyped_storage()
        slot = f"{place.slot}/{self.ledger.ops[op].name}/{label}"
        if num_bytes is None:
            num_bytes = storage.nbytes()
        self._sticky = place.group
        category = (
            "weights"
            if self.places.phase == "init"
            else "activations"
            if self.places.phase == "data"
            else "temporary"
        )
        index = self._add_storage(num_bytes, op, slot, place.group, category)
        if place.recomputing:
            self._recomputed.append(index)
        self._follow(storage, index)
        return index

    def _add_storage(self, num_bytes: int, op: int, slot: str, group: int, category: str) -> int:
        index = len(self.ledger.storages)
        slot = f"{self._segment}/{slot}/{self._count(group, slot)}"
        self.ledger.storages.append(Storage(num_bytes, category, group, op, slot))
        self.ledger.events.append(Event(ALLOCATE, index, group, self._segment))
        self._born.append(self._segment)
        return index

    def _count(self, group: int, slot: str) -> int:
        key = (self._segment, group, slot)
        self._seen[key] = self._seen.get(key, -1) + 1
        return self._seen[key]

    def _add_scratch(self, sizes: tuple[int, ...], op: int, place: Place, name: str) -> None:
        """Scratch of one kernel: allocated together, freed when it returns."""
        indices = [
            self._add_storage(size, op, f"{place.slot}/{name}/scratch", place.group, "temporary")
            for size in sizes
            if size
        ]
        for index in reversed(indices):
            self.ledger.events.append(Event(FREE, index, place.group, self._segment))

    def _follow(self, storage: Any, index: int) -> None:
        address = storage._cdata
        self._live[address] = index

        def freed(_: Any) -> None:
            self._refs.pop(address, None)
            if self._live.get(address) == index:
                del self._live[address]
                self._add_free(index)

        self._refs[address] = weakref.ref(storage, freed)

    def _add_free(self, index: int) -> None:
        # An optimizer that works on lists frees lists: each tensor belongs to its own parameter's group. Elsewhere a
        # free belongs to where it happens.
        in_list = self.places.owned_now() and (index in self._listed or self._born[index] != self._segment)
        owner = self._owners.get(index) if in_list else None
        group = (
            self._sticky
            if not in_list
            else self.ledger.storages[index].group
            if owner is None
            else owner.group
        )
        self.ledger.events.append(Event(FREE, index, group, self._segment))


def _of_group(value: Any, owners: list[Place], group: int | None) -> Any:
    """Arguments or results of an operation over lists: of each list, the entries whose owner is in the group."""
    if isinstance(value, dict):
        return {name: _of_group(item, owners, group) for name, item in value.items()}
    if isinstance(value, list) and len(value) == len(owners):
        return [item for item, owner in zip(value, owners, strict=True) if owner.group == group]
    if isinstance(value, list | tuple):
        return type(value)(_of_group(item, owners, group) for item in value)
    return value


def _tensors(tree: Any) -> list[Tensor]:
    """Of an operation's arguments or results, which are nested in lists, tuples and dicts alone, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, NESTED):
        return []
    found: list[Tensor] = []
    for item in tree:
        if type(item) in LEAVES:
            continue
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, NESTED):
            found += _tensors(item)
    return found


def _dtype(args: Any, out: Any) -> str:
    """Dtype of the first floating tensor among the inputs, else of the output."""
    for t in _tensors((args, out)):
        if t.is_floating_point():
            return str(t.dtype).removeprefix("torch.")
    return "int64"
