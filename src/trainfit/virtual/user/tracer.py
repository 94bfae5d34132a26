"""The tracer of a person's own code: devices named "cuda" become the virtual GPU's, and fake host tensors take nothing.

What ``UserTensors`` sees above autograd it has already said in its own words; here arrives what PyTorch's Python code
calls out of its sight (inside ``torch.nn.functional``), and every operation on parameters that are still on the host.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor
from torch.utils._pytree import tree_iter, tree_map_only

from trainfit.spec.errors import InputError
from trainfit.virtual.host import carried_values, carry_values, is_host, on_host
from trainfit.virtual.places import Places
from trainfit.virtual.temporaries import GpuTraits
from trainfit.virtual.tracer import READS_VALUE, Tracer
from trainfit.virtual.user.side import CPU, is_device, is_marked, mark, names_cuda
from trainfit.virtual.user.tensors import SidedResidence

aten = torch.ops.aten


class UserTracer(Tracer):
    """Records what runs on the virtual GPU, and lets the host's part run for real or as a fake."""

    def __init__(self, gpu: GpuTraits, places: Places, residence: SidedResidence):
        super().__init__(gpu, places, residence)
        self._residence = residence
        self.is_inside = False
        """PyTorch's own code asks: it must see fake CPU tensors as they are."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outer, self.is_inside = self.is_inside, True
        try:
            return self._dispatch(func, types, args, kwargs or {})
        finally:
            self.is_inside = outer

    def _dispatch(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        device = kwargs.get("device")
        if device is not None and names_cuda(device):
            kwargs = {**kwargs, "device": CPU}
            if func is aten._to_copy.default and is_device(args[0]) and _changes_nothing(args[0], kwargs):
                return aten.alias.default(args[0])
            return self._on_device(func, types, args, kwargs)
        tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        if self._residence.is_leaving:
            return _marked(func(*args, **kwargs))
        if self._residence.is_moving or not any(is_marked(t) for t in tensors):
            return self._traced(func, types, args, kwargs)
        if any(is_device(t) for t in tensors):
            return self._traced(func, types, args, kwargs)
        if func in READS_VALUE:
            return 0.0 if args[0].is_floating_point() else 0
        return _marked(func(*args, **kwargs))

    def _on_device(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        with self._residence.moving():
            return self._traced(func, types, args, kwargs)

    def _traced(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func is aten.copy_.default and is_host(args[0]) and is_device(args[1]):
            return self._copied_to_host(args[0], args[1])
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except DynamicOutputShapeException as error:
            return self._sized_by_values(func, args, kwargs, error)

    def _copied_to_host(self, target: Tensor, source: Tensor) -> Tensor:
        known = carried_values(source)
        if known is not None:
            on_host(target.copy_, (known,), {})
        return target

    def _sized_by_values(self, func: Any, args: Any, kwargs: Any, error: Exception) -> Any:
        """An operation whose result's size follows from values (``nonzero``, a mask as an index), if they are known."""
        values = [carried_values(t) for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        if any(value is None for value in values):
            raise InputError(
                f"{func} gives a result whose size only the data can tell",
                "give the traced callable a version of this step whose sizes are fixed",
                field="step",
            ) from error
        real_args, real_kwargs = tree_map_only(Tensor, carried_values, (args, kwargs))
        real = on_host(func, real_args, real_kwargs)

        def fake(t: Tensor) -> Tensor:
            return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)

        out = tree_map_only(Tensor, fake, real)
        carry_values(func, args, kwargs, out)
        self._record(func, args, kwargs, out)
        return out

    def _is_fresh(self, t: Tensor) -> bool:
        return super()._is_fresh(t) and not is_host(t) and not is_marked(t)

    def hold_as(self, category: str, indices: Iterable[int]) -> None:
        """What has no category yet among these storages gets this one."""
        self._categorise(category, indices)

    def born_in(self, segment: int) -> list[int]:
        """Storages alive that were allocated in a segment."""
        return [index for index in self.live_indices() if self._born[index] == segment]


def _marked(out: Any) -> Any:
    for t in tree_iter(out):
        if isinstance(t, FakeTensor):
            mark(t)
    return out


def _changes_nothing(t: Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether this conversion is to where and what the tensor is already."""
    return kwargs.get("dtype") in (None, t.dtype) and kwargs.get("memory_format") in (
        None,
        torch.preserve_format,
    )
