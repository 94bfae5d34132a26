"""The storages that live now, and whose they are: a ledger's allocations and frees.

Enters: the tensors that operations make, and what the step says of them. Leaves: storages and events of the ledger. One
weak reference per storage tells when it is freed, so autograd's own order of frees is what is recorded.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from trainfit.ledger.ledger import ALLOCATE, FREE, NO_LAYER, Event, Ledger, Segment, Storage
from trainfit.virtual.trace.scope import NO_SCOPE, Scope, ScopeTracker
from trainfit.virtual.trace.tensors import tensors_of

UNKNOWN = -1
"""In place of a ledger index: not a device storage."""


class LiveStorages:
    """Follows storages from their allocation to their free, in the ledger's present segment."""

    def __init__(self, scopes: ScopeTracker):
        self.ledger = Ledger()
        self.segment = UNKNOWN
        """Index of the ledger's present segment."""
        self.group_at_work = NO_LAYER
        """Group of layers that something last ran in or was allocated for: what is freed now is freed there."""
        self._scopes = scopes
        scopes.on_recomputed = self._keep_recomputed
        self._live: dict[int, int] = {}
        """Address of a live storage -> its index in the ledger."""
        self._refs: dict[int, Any] = {}
        self._owners: dict[int, Scope] = {}
        """Index of a storage -> place of the parameter it belongs to."""
        self._last_owner = NO_SCOPE
        self._made_from: dict[int, int] = {}
        """Index of a storage -> that of what it was converted from while the model was built."""
        self._listed: set[int] = set()
        """Storages that an operation over a list of parameters made."""
        self._categories: dict[int, str] = {}
        self._born: list[int] = []
        """Index of a storage -> the segment it was allocated in."""
        self._seen: dict[tuple[int, int, str], int] = {}
        self._recomputed: list[int] = []

    # -- what the step tells ------------------------------------------------------------------------------------

    def begin(self, step: str, phase: str) -> None:
        """A segment begins; what a forward leaves alive for its backward are activations."""
        if phase == "backward":
            self.categorise("activations", self.born_in(len(self.ledger.segments) - 1))
        self.ledger.segments.append(Segment(step, phase))
        self.segment = len(self.ledger.segments) - 1
        self.group_at_work, self._last_owner = NO_LAYER, NO_SCOPE

    def own(self, tensor: Tensor, category: str, scope: Scope) -> None:
        """The tensor's storage is of this category and belongs to the parameter at this place.

        What parameters of several groups of layers share belongs to none.
        """
        index = self.index_of(tensor)
        if index != UNKNOWN:
            if category == "weights" and self._owners.get(index, scope).group != scope.group:
                scope = NO_SCOPE
            self._categories[index] = category
            self._owners[index] = scope

    def watch_gradient(self, parameter: Tensor, scope: Scope) -> None:
        """Each gradient that arrives is the parameter's at this place."""

        def arrived(owner: Tensor) -> None:
            if owner.grad is not None:
                self.own(owner.grad, "gradients", scope)

        prepend_grad_hook(parameter, arrived)

    def categorise(self, category: str, indices: Iterable[int]) -> None:
        """What has no category yet among these storages gets this one."""
        for index in indices:
            self._categories.setdefault(index, category)

    def forget(self, tensors: Iterable[Tensor]) -> None:
        """These parameters were cut out of the model: strike them from the ledger, frees included."""
        dropped = {self._live.pop(t.untyped_storage()._cdata) for t in tensors if self.index_of(t) != UNKNOWN}
        self.ledger.events = [event for event in self.ledger.events if event.storage not in dropped]

    def built(self) -> None:
        """The model is complete: give what was allocated for it, and what that was made from, its owners' groups."""
        storages = self.ledger.storages
        owned = dict(self._owners)
        for index, scope in owned.items():
            while index != UNKNOWN and owned.get(index, scope) == scope:
                self._owners[index] = scope
                path = f"weights/{scope.path}"
                storages[index] = storages[index]._replace(
                    group=scope.group, path=f"{path}/{self._count(scope.group, path)}"
                )
                index = self._made_from.pop(index, UNKNOWN)
        self.ledger.events = [
            event._replace(group=storages[event.storage].group) for event in self.ledger.events
        ]

    def finish(self) -> Ledger:
        """The ledger, with the categories that only the whole run tells. What is freed later is not in it."""
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
        finished, self.ledger = self.ledger, Ledger()
        self._live.clear()  # What is freed from here on is the end of the trace, not of the run.
        return finished

    def _keep_recomputed(self) -> None:
        live = set(self._live.values())
        self.categorise("activations", (i for i in self._recomputed if i in live))
        self._recomputed.clear()

    # -- what is there ------------------------------------------------------------------------------------------

    def has(self, t: Tensor) -> bool:
        """Whether the tensor's storage is followed."""
        return t.untyped_storage()._cdata in self._live

    def index_of(self, t: Tensor) -> int:
        """Index of the tensor's storage in the ledger; UNKNOWN if it is not followed."""
        return self._live.get(t.untyped_storage()._cdata, UNKNOWN)

    def born_in(self, segment: int) -> list[int]:
        """Storages alive that were allocated in a segment."""
        return [index for index in self._live.values() if self._born[index] == segment]

    def owners_of(self, args: Any) -> list[Scope]:
        """Parameters that the first tensor argument belongs to; of a list of tensors, each one's.

        What belongs to none (a state tensor being made) is taken for the parameter last worked on.
        """
        owners = [self._last_owner]
        for arg in args:
            tensors = tensors_of(arg)
            if tensors:
                owners = [self._owners.get(self.index_of(t), self._last_owner) for t in tensors]
                break
        if len({owner.group for owner in owners}) == 1:
            self._last_owner = owners[0]
        return owners

    # -- allocations and frees ----------------------------------------------------------------------------------

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
        """An operation made the tensor's storage.

        Args:
            label: tells it from the operation's other results.
            op: index of the operation in the ledger.
            num_bytes: where they are not the storage's own.
            is_owned: the place is that of the parameter it belongs to.
            is_listed: the operation was over a list of several parameters.
            source: what it was converted from.
        """
        storage = t.untyped_storage()
        path = f"{scope.path}/{self.ledger.ops[op].name}/{label}"
        if num_bytes is None:
            num_bytes = storage.nbytes()
        self.group_at_work = scope.group
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
            self._made_from[index] = self.index_of(source)

    def add(self, num_bytes: int, op: int, path: str, group: int, category: str) -> int:
        """An allocation that is no tensor's: its index. Nothing but ``free`` frees it."""
        index = len(self.ledger.storages)
        path = f"{self.segment}/{path}/{self._count(group, path)}"
        self.ledger.storages.append(Storage(num_bytes, category, group, op, path))
        self.ledger.events.append(Event(ALLOCATE, index, group, self.segment))
        self._born.append(self.segment)
        return index

    def free(self, index: int, group: int) -> None:
        """It is freed, where this group of layers is at work."""
        self.ledger.events.append(Event(FREE, index, group, self.segment))

    def add_scratch(self, sizes: tuple[int, ...], op: int, scope: Scope, name: str) -> None:
        """Scratch of one kernel: allocated together, freed when it returns."""
        path = f"{scope.path}/{name}/scratch"
        indices = [self.add(size, op, path, scope.group, "temporary") for size in sizes if size]
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
        """Where it is freed, but for an optimizer that works on lists: there each tensor is its own parameter's group's."""
        in_list = self._scopes.owned_now() and (index in self._listed or self._born[index] != self.segment)
        if not in_list:
            return self.group_at_work
        owner = self._owners.get(index)
        return self.ledger.storages[index].group if owner is None else owner.group


def prepend_grad_hook(parameter: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Register a post-accumulate-grad hook that runs before those already there, which may free the gradient.

    The engine walks the hooks in insertion order (``PyDict_Next`` in torch/csrc/autograd/python_hook.cpp) and
    ignores the order that ``OrderedDict.move_to_end`` sets.
    """
    handle = parameter.register_post_accumulate_grad_hook(hook)
    hooks: Any = parameter._post_accumulate_grad_hooks
    inserted = list(hooks.items())
    hooks.clear()
    hooks.update([inserted[-1], *inserted[:-1]])
    return handle
