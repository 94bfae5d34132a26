"""Find the allocations inside trainfit's kernels by running their launchers on fake tensors, without
launches.

An operation has a launcher as its attribute ``dry_run`` (kernels/custom_op.py).
"""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainfit.virtual.cuda.fake_impls import run
from trainfit.virtual.cuda.scratch import copied_bytes, scratch_bytes
from trainfit.virtual.cuda.scratch.gpu_traits import GpuTraits
from trainfit.virtual.trace.tensors import tensors_of


class DryRun(TorchDispatchMode):
    """Records allocations and frees while it is entered, scratch of PyTorch's own kernels included."""

    def __init__(self, inputs: Iterable[Tensor], gpu: GpuTraits):
        super().__init__()
        self.gpu = gpu
        self.changes: list[tuple[int, bool]] = []
        """(number of a storage, whether it was freed) for each allocation and free, in order."""
        self.num_bytes: list[int] = []
        """Size of each storage, by its number."""
        self._live = {t.untyped_storage()._cdata: -1 for t in inputs}
        self._refs: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = len(self.num_bytes)
        self.num_bytes += copied_bytes(func, args, kwargs or {}, gpu=self.gpu)
        copies = range(first, len(self.num_bytes))
        self.changes += [(number, False) for number in copies]
        out = run(func, args, kwargs or {})
        for t in tensors_of(out):
            if t.untyped_storage()._cdata not in self._live:
                self._follow(t)
        first = len(self.num_bytes)
        self.num_bytes += scratch_bytes(func, args, kwargs or {}, out, gpu=self.gpu)
        scratch = range(first, len(self.num_bytes))
        self.changes += [(number, is_free) for is_free in (False, True) for number in scratch]
        self.changes += [(number, True) for number in copies]
        return out

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._refs.clear()  # Later frees of the results are not recorded.

    def number_of(self, t: Tensor) -> int:
        """Return the number of the tensor's storage, which must be alive; -1 for an input's."""
        return self._live[t.untyped_storage()._cdata]

    def _follow(self, t: Tensor) -> None:
        storage = t.untyped_storage()
        address, number = storage._cdata, len(self.num_bytes)
        self.num_bytes.append(storage.nbytes())
        self.changes.append((number, False))
        self._live[address] = number

        def freed(_: Any) -> None:
            self._live.pop(address, None)
            self._refs.pop(number, None)
            self.changes.append((number, True))

        self._refs[number] = weakref.ref(storage, freed)


def dry_run(func: Any, args: Any, kwargs: Any, gpu: GpuTraits) -> tuple[Any, DryRun] | None:
    """Return the results and the dry run of an operation that has one, else None."""
    own = getattr(func, "dry_run", None)
    if own is None:
        return None
    with DryRun(tensors_of((args, kwargs)), gpu) as run:
        out = own(*args, **kwargs, capability=gpu.compute_capability)
    return out, run
