"""Live storages, their categories and owners; a weak reference to each records its free."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from trainfit.ledger.ledger import ALLOCATE, FREE, NO_LAYER, Event, Ledger, Segment, Storage
from trainfit.virtual.trace.observer import Observer
from trainfit.virtual.trace.scope import NO_SCOPE, Scope, ScopeTracker
from trainfit.virtual.trace.tensors import tensors_of

UNKNOWN = -1
"""Index of a tensor whose storage is not in the ledger."""


class LiveStorages(Observer):
    """Tracks storages from allocation to free in the ledger's current segment.

    It observes the ends of forwards: tensors that a recomputation leaves alive are activations.
    """

    def __init__(self, scopes: ScopeTracker, observers: Sequence[Observer] = ()):
        self.ledger = Ledger()
        self.segment = UNKNOWN
        """Index of the current segment."""
        self.current_group = NO_LAYER
        """Group of layers of the last operation or allocation, to which a free is attributed."""
        self._scopes, self._observers = scopes, tuple(observers)
        scopes.observers.append(self)
        self._live: dict[int, int] = {}
        """Address of a live storage -> its index in the ledger."""
        self._refs: dict[int, Any] = {}
        self._owners: dict[int, Scope] = {}
        """Index of a storage -> scope of the parameter that it belongs to."""
        self._taken_turns_in: set[int] = set()
        """Indices of buffers in which groups take turns."""
        self._last_owner = NO_SCOPE
        self._converted_from: dict[int, int] = {}
        """Index of a storage -> that of the storage it was converted from while the model was built."""
        self._listed: set[int] = set()
        """Storages allocated by an operation on a list of parameters."""
        self._categories: dict[int, str] = {}
        self._segments: list[int] = []
        """Index of a storage -> the segment in which it was allocated."""
        self._seen: dict[tuple[int, int, str], int] = {}
        self._recomputed: list[int] = []

    def begin(self, step: str, phase: str) -> None:
        """Begin a segment; storages that the forwards before a backward leave alive are activations."""
        if phase == "backward":
            for number in reversed(range(len(self.ledger.segments))):
                self.categorise("activations", self.allocated_in(number))
                if self.ledger.segments[number].phase != "forward":
                    break
        self.ledger.segments.append(Segment(step, phase))
        self.segment = len(self.ledger.segments) - 1
        self.current_group, self._last_owner = NO_LAYER, NO_SCOPE

    def own(self, tensor: Tensor, category: str, scope: Scope) -> None:
        """Set the category and the owner of a tensor's storage; one shared by several groups has no owner.

        Of a DTensor it is this rank's part.
        """
        index = self.index_of(getattr(tensor, "_local_tensor", tensor))
        if index != UNKNOWN:
            if category == "weights" and self._owners.get(index, scope).group != scope.group:
                scope = NO_SCOPE
            self._categories[index] = category
            self._owners[index] = scope

    def own_in_turns(self, tensor: Tensor, category: str) -> None:
        """Set the category of a storage in which groups take turns.

        It is of no group; an operation on it is of the group of the operation before.
        """
        self.own(tensor, category, NO_SCOPE)
        self._taken_turns_in.add(self.index_of(tensor))

    def watch_gradient(self, parameter: Tensor, scope: Scope) -> None:
        """Assign each accumulated gradient to the parameter's scope."""
        weak = weakref.ref(self)  # The garbage collector does not see a parameter's hooks.

        def own_gradient(owner: Tensor) -> None:
            if owner.grad is not None and (live := weak()) is not None:
                live.own(owner.grad, "gradients", scope)

        prepend_grad_hook(parameter, own_gradient)

    def categorise(self, category: str, indices: Iterable[int]) -> None:
        """Set the category of those storages that have none."""
        for index in indices:
            self._categories.setdefault(index, category)

    def forget(self, tensors: Iterable[Tensor]) -> None:
        """Remove the allocations and frees of parameters that were trimmed from the model."""
        dropped = {self._live.pop(t.untyped_storage()._cdata) for t in tensors if self.index_of(t) != UNKNOWN}
        self.ledger.events = [event for event in self.ledger.events if event.storage not in dropped]

    def built(self) -> None:
        """Assign the complete model's storages, and their sources, to their owners' groups."""
        storages = self.ledger.storages
        owned, assigned = dict(self._owners), set[int]()
        for index, scope in owned.items():
            while index != UNKNOWN and owned.get(index, scope) == scope:
                self._owners[index] = scope
                assigned.add(index)
                path = f"weights/{scope.path}"
                storages[index] = storages[index]._replace(
                    group=scope.group, path=f"{path}/{self._count(scope.group, path)}"
                )
                index = self._converted_from.pop(index, UNKNOWN)
        self.ledger.events = [
            event._replace(group=storages[event.storage].group) if event.storage in assigned else event
            for event in self.ledger.events
        ]

    def finish(self) -> Ledger:
        """Return the ledger with final categories; later frees are not recorded."""
        storages = self.ledger.storages
        for index, category in self._categories.items():
            storages[index] = storages[index]._replace(category=category)
            if category == "optimizer":
                # Also a state tensor made without a parameter as input (a step counter).
                storages[index] = storages[index]._replace(group=self._owners[index].group)
        self.ledger.events = [
            e._replace(group=storages[e.storage].group) if storages[e.storage].category == "optimizer" else e
            for e in self.ledger.events
        ]
        finished, self.ledger = self.ledger, Ledger()
        self._live.clear()
        return finished

    def forward_ended(self) -> None:
        if self._scopes.phase != "backward":
            return
        live = set(self._live.values())
        self.categorise("activations", (i for i in self._recomputed if i in live))
        self._recomputed.clear()

    def has(self, t: Tensor) -> bool:
        """Return whether the tensor's storage is in the ledger."""
        return t.untyped_storage()._cdata in self._live

    def index_of(self, t: Tensor) -> int:
        """Return the index of the tensor's storage in the ledger, or UNKNOWN."""
        return self._live.get(t.untyped_storage()._cdata, UNKNOWN)

    def allocated_in(self, segment: int) -> list[int]:
        """Return the live storages that were allocated in a segment."""
        return [index for index in self._live.values() if self._segments[index] == segment]

    def category_of(self, index: int) -> str:
        """Return the category of a storage so far."""
        return self._categories.get(index, self.ledger.storages[index].category)

    def group_of(self, args: Any) -> int:
        """Return the group of layers that owns the first tensor argument, or else that allocated it."""
        first = next(iter(tensors_of(args)), None)
        if first is None or (index := self.index_of(first)) == UNKNOWN:
            return NO_LAYER
        return self._owners[index].group if index in self._owners else self.ledger.storages[index].group

    def owners_of(self, args: Any) -> list[Scope]:
        """Return the owner of the first tensor argument, or of each tensor of a list; else the last owner."""
        owners = [self._last_owner]
        for arg in args:
            tensors = tensors_of(arg)
            if tensors:
                owners = [self._owner_of(t) for t in tensors]
                break
        if len({owner.group for owner in owners}) == 1:
            self._last_owner = owners[0]
        return owners

    def _owner_of(self, t: Tensor) -> Scope:
        index = self.index_of(t)
        if index in self._taken_turns_in:
            return self._last_owner
        return self._owners.get(index, self._last_owner)

    def allocate(
        self,
        t: Tensor,
        label: str,
        op: int,
        scope: Scope,
        *,
        num_bytes: int | None = None,
        is_owned: bool = False,
        is_listed: bool = False,
        source: Tensor | None = None,
    ) -> None:
        """Record the allocation of an operation's result.

        Args:
            label: name of the result among the operation's results.
            op: index of the operation in the ledger.
            num_bytes: on CUDA, if not the storage's own.
            is_owned: the scope is that of the parameter that it belongs to.
            is_listed: the operation works on a list of several parameters.
            source: the tensor that it was converted from.
        """
        storage = t.untyped_storage()
        path = f"{scope.path}/{self.ledger.ops[op].name}/{label}"
        if num_bytes is None:
            num_bytes = storage.nbytes()
        self.current_group = scope.group
        category = {"init": "weights", "data": "activations"}.get(self._scopes.phase, "temporary")
        index = self.add(num_bytes, op, path, scope.group, category)
        if scope.recomputing:
            self._recomputed.append(index)
        self._follow(storage, index)
        if is_owned:
            self._owners[index] = scope
        if is_listed:
            self._listed.add(index)
        if source is not None:
            self._converted_from[index] = self.index_of(source)

    def add(self, num_bytes: int, op: int, path: str, group: int, category: str) -> int:
        """Record an allocation without a tensor, which ``free`` frees, and return its index."""
        index = len(self.ledger.storages)
        path = f"{self.segment}/{path}/{self._count(group, path)}"
        self.ledger.storages.append(Storage(num_bytes, category, group, op, path))
        self.ledger.events.append(Event(ALLOCATE, index, group, self.segment))
        self._segments.append(self.segment)
        for observer in self._observers:
            observer.allocated(index)
        return index

    def free(self, index: int, group: int) -> None:
        """Record a free in a group of layers."""
        self.ledger.events.append(Event(FREE, index, group, self.segment))

    def index_of_storage(self, storage: Any) -> int | None:
        """Return a storage's index in the ledger; None: it is not there."""
        return self._live.get(storage._cdata)

    def resize(self, storage: Any, index: int, num_bytes: int, name: str) -> int:
        """Record that a storage was resized in place, a free and an allocation; return its new index."""
        old = self.ledger.storages[index]
        self.free(index, old.group)
        _, _, path = old.path.partition("/")
        path = path.rpartition("/")[0]
        path = path if path.endswith(name) else f"{path}/{name}"
        index = self.add(num_bytes, old.op, path, old.group, old.category)
        self._follow(storage, index)
        return index

    def add_scratch(self, sizes: tuple[int, ...], op: int, scope: Scope, name: str) -> None:
        """Record a kernel's scratch, allocated together and freed when it returns."""
        self.free_scratch(self.begin_scratch(sizes, op, scope, name), scope)

    def begin_scratch(self, sizes: tuple[int, ...], op: int, scope: Scope, name: str) -> list[int]:
        """Record allocations of a kernel for itself; return what ``free_scratch`` frees."""
        path = f"{scope.path}/{name}/scratch"
        return [self.add(size, op, path, scope.group, "temporary") for size in sizes if size]

    def free_scratch(self, indices: list[int], scope: Scope) -> None:
        """Record that a kernel frees what it allocated for itself, the last first."""
        for index in reversed(indices):
            self.free(index, scope.group)

    def _count(self, group: int, path: str) -> int:
        key = (self.segment, group, path)
        self._seen[key] = self._seen.get(key, -1) + 1
        return self._seen[key]

    def _follow(self, storage: Any, index: int) -> None:
        address = storage._cdata
        self._live[address] = index

        def freed(_: Any) -> None:
            self._refs.pop(address, None)
            if self._live.get(address) == index:
                del self._live[address]
                self.free(index, self._group_of_free(index))

        self._refs[address] = weakref.ref(storage, freed)

    def _group_of_free(self, index: int) -> int:
        """Return the current group, or the owner's for an optimizer's operations on lists."""
        is_listed = index in self._listed or self._segments[index] != self.segment
        if not (is_listed and self._scopes.owned_now()):
            return self.current_group
        owner = self._owners.get(index)
        return self.ledger.storages[index].group if owner is None else owner.group


def prepend_grad_hook(parameter: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Register a post-accumulate-grad hook that runs before those already there, which may free the gradient.

    The engine walks the hooks in insertion order (``PyDict_Next`` in torch/csrc/autograd/python_hook.cpp).
    """
    handle = parameter.register_post_accumulate_grad_hook(hook)
    hooks: Any = parameter._post_accumulate_grad_hooks
    inserted = list(hooks.items())
    hooks.clear()
    hooks.update([inserted[-1], *inserted[:-1]])
    return handle
