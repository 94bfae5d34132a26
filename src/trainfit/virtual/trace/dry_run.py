"""What an operation of ours allocates inside itself on a GPU, found by rehearsing it.

An operation with an attribute ``dry_run`` (kernels/custom_op.py) runs its own launcher on fake tensors, without
launches. Here each storage that it makes is noted, and each that it drops, in order.
"""

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainfit.virtual.cuda.fake_impls import run
from trainfit.virtual.trace.tensors import tensors_of


class Change(NamedTuple):
    """A storage is made, or freed."""

    storage: int
    """Its number in the dry run."""
    is_free: bool


class DryRun(TorchDispatchMode):
    """Notes the storages that operations make while it is entered, and their frees."""

    def __init__(self, inputs: Iterable[Tensor]):
        super().__init__()
        self.changes: list[Change] = []
        self.num_bytes: list[int] = []
        """Of each storage, by its number."""
        self._live = {t.untyped_storage()._cdata: -1 for t in inputs}
        self._refs: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = run(func, args, kwargs or {})
        for t in tensors_of(out):
            if t.untyped_storage()._cdata not in self._live:
                self._follow(t)
        return out

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._refs.clear()  # What becomes of its results is not its own doing.

    def number_of(self, t: Tensor) -> int:
        """The number of the tensor's storage, which must be alive; -1 for an input's."""
        return self._live[t.untyped_storage()._cdata]

    def _follow(self, t: Tensor) -> None:
        storage = t.untyped_storage()
        address, number = storage._cdata, len(self.num_bytes)
        self.num_bytes.append(storage.nbytes())
        self.changes.append(Change(number, is_free=False))
        self._live[address] = number

        def freed(_: Any) -> None:
            self._live.pop(address, None)
            self._refs.pop(number, None)
            self.changes.append(Change(number, is_free=True))

        self._refs[number] = weakref.ref(storage, freed)


def dry_run(func: Any, args: Any, kwargs: Any, capability: tuple[int, int]) -> tuple[Any, DryRun] | None:
    """The operation's results on a GPU of this capability, and what it did to memory; None for all but ours that say so."""
    own = getattr(func, "dry_run", None)
    if own is None:
        return None
    with DryRun(tensors_of((args, kwargs))) as run:
        out = own(*args, **kwargs, capability=capability)
    return out, run
