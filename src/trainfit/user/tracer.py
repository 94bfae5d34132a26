"""The tracer of user code: translates "cuda" to the virtual GPU and ignores fake host tensors.

``UserTensorMode`` translates calls above autograd; this mode sees calls inside PyTorch's Python code.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._library.triton import triton_ops_to_kernels
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from trainfit.spec.errors import InputError
from trainfit.user.placement import CPU, CUDA, is_device, is_marked, mark, names_cuda
from trainfit.user.python_calls import PythonCalls
from trainfit.virtual.cuda.fake_impls import READS_VALUE
from trainfit.virtual.cuda.scratch import GpuTraits
from trainfit.virtual.trace.dry_run import DryRun
from trainfit.virtual.trace.host_tensors import (
    PlacementState,
    carried_values,
    carry_values,
    is_host,
    on_host,
)
from trainfit.virtual.trace.observer import Observer
from trainfit.virtual.trace.scope import ScopeTracker
from trainfit.virtual.trace.tensors import tensors_of
from trainfit.virtual.trace.tracer import LIFTS, Tracer

aten = torch.ops.aten
INDEXING = tuple(
    f"aten::{name}" for name in "index index_put index_put_ _index_put_impl_ _unsafe_index".split()
)
ACROSS_SIDES = (*INDEXING, "aten::copy_", "aten::_to_copy", "aten::set_", "aten::is_same_size", "aten::equal")
"""Operations whose tensors may be on different devices."""
ALL_SELECTED = "a mask that depends on the data is assumed to select all elements"


class UserTracer(Tracer):
    """Records operations on the virtual GPU; those on the host run unrecorded."""

    def __init__(
        self,
        gpu: GpuTraits,
        scopes: ScopeTracker,
        placement: PlacementState,
        fake: FakeTensorMode,
        observers: Sequence[Observer] = (),
    ):
        self._fake = fake
        self.is_inside = False  # True while PyTorch's own code runs, which must see fake tensors on the CPU
        self.python_calls = PythonCalls()
        self.notes: set[str] = set()  # Deviations of the trace from a real run
        self.functions: AbstractContextManager[Any] = nullcontext()
        """The mode that translates calls above autograd (``UserTensorMode``)."""
        super().__init__(gpu, scopes, placement, observers)  # Last: it attaches the observers.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # The operations of a wrapper subclass (DTensor) come back here.
        counts = self.python_calls.pause()
        try:
            with self.inside():
                return self._dispatch(func, types, args, kwargs or {})
        finally:
            if counts:
                self.python_calls.resume()

    @contextmanager
    def inside(self, value: bool = True) -> Iterator[None]:
        """Let fake tensors report the CPU."""
        outer, self.is_inside = self.is_inside, value
        try:
            yield
        finally:
            self.is_inside = outer

    @contextmanager
    def python_body(self) -> Iterator[None]:
        """Trace the Python code of an operator, which runs below its dispatch, as other code of the user."""
        with ExitStack() as stack:
            stack.enter_context(self.inside(False))
            if self.functions not in torch.overrides._get_current_function_mode_stack():
                stack.enter_context(self.functions)
            stack.enter_context(super().python_body())
            yield

    def _dispatch(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func.namespace == "c10d":
            for observer in self.observers:
                observer.collective_begins(func)
        device = kwargs.get("device")
        if device is not None and names_cuda(device):
            kwargs = {**kwargs, "device": CPU}
            if func is aten._to_copy.default and is_device(args[0]) and _changes_nothing(args[0], kwargs):
                return aten.alias.default(args[0])
            with self.placement.moving():
                return self._traced(func, types, args, kwargs)
        tensors = tensors_of((args, kwargs))
        if func.namespace in self.libraries and any(map(is_device, tensors)):
            return self.libraries[func.namespace](func, args, kwargs)
        body = _python_body(func)
        if body is not None and any(map(is_device, tensors)):
            with self.python_body():
                return body(*args, **kwargs)
        if func in LIFTS and is_host(args[0]):
            return on_host(func, args, kwargs)  # from_numpy and torch.tensor, which move the result later
        if self.placement.is_leaving:
            return _marked(func(*args, **kwargs))
        if self.placement.is_moving or not any(map(is_marked, tensors)) or any(map(is_device, tensors)):
            return self._traced(func, types, args, kwargs)
        if func in READS_VALUE:
            return 0.0 if args[0].is_floating_point() else 0
        return _marked(func(*args, **kwargs))

    def _traced(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        _check_sides(func, args, kwargs)
        if func is aten.copy_.default and is_host(args[0]) and is_device(args[1]):
            known = carried_values(args[1])
            return args[0] if known is None else on_host(args[0].copy_, (known,), {})
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except DynamicOutputShapeException as error:
            return self._sized_by_data(func, args, kwargs, error)

    def _sized_by_data(self, func: Any, args: Any, kwargs: Any, error: Exception) -> Any:
        """Run an operation with a data-dependent size on known values, else with masks that select all."""
        values = [carried_values(t) for t in tensors_of((args, kwargs))]
        if all(value is not None for value in values):
            return self._sized_by_values(func, args, kwargs)
        with self:
            if func is aten.nonzero.default:
                self.notes.add(ALL_SELECTED)
                mask = args[0]
                return torch.empty(mask.numel(), mask.dim(), dtype=torch.int64, device=CUDA)
            if func is aten.masked_select.default:
                return aten.index.Tensor(args[0], [args[1]])
            if func._schema.name in INDEXING:
                indices = [part for index in args[1] for part in _as_positions(index)]
                return func(args[0], indices, *args[2:], **kwargs)
        raise InputError(
            f"the size of {func}'s result depends on the data",
            "give the traced callable a version of this step whose sizes are fixed",
            field="step",
        ) from error

    def _sized_by_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        real_args, real_kwargs = tree_map_only(Tensor, carried_values, (args, kwargs))
        real = on_host(func, real_args, real_kwargs)

        def fake(t: Tensor) -> Tensor:
            return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)

        out = tree_map_only(Tensor, fake, real)
        carry_values(func, args, kwargs, tensors_of((args, kwargs)), out)
        self._record(func, args, kwargs, out)
        return out

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any, dry_run: DryRun | None = None) -> None:
        for observer in self.observers:
            observer.record_begins()
        num_storages = len(self.ledger.storages)
        super()._record(func, args, kwargs, out, dry_run)
        for observer in self.observers:
            observer.recorded(func, args, kwargs, out, num_storages)
        if func is not aten._to_copy.default or not self.placement.is_moving:
            return
        if not out.is_contiguous() and out.stride() != args[0].stride():
            # A host-to-device copy that changes the layout needs a contiguous copy on the device (Copy.cu).
            size = out.numel() * out.element_size()
            self.live.add_scratch((size,), len(self.ledger.ops) - 1, self.scopes.current(), str(func))

    def _host_calls(self, group: int) -> dict[str, Any]:
        return {**super()._host_calls(group), "python": self.python_calls.take()}

    def _is_fresh(self, t: Tensor) -> bool:
        return super()._is_fresh(t) and not is_host(t) and not is_marked(t)

    def twin_on_host(self, data: Tensor) -> Tensor:
        """Return a fake tensor on the host, like a real one."""
        shape, stride, dtype = data.shape, data.stride(), data.dtype
        with self.inside(), _disable_current_modes(), self._fake:
            twin = torch.empty_strided(shape, stride, dtype=dtype, device=CPU)
        mark(twin)
        return twin


@lru_cache(maxsize=4096)
def _python_body(func: Any) -> Callable[..., Any] | None:
    """Return the Python implementation of a custom operator that is recorded as its parts, else None.

    These are ``torch.library.triton_op``, and a ``custom_op`` that has no fake implementation.
    """
    defined: Any = OPDEFS.get(func._schema.name)
    if defined is None:
        return None
    if func._schema.name in triton_ops_to_kernels:
        return defined._abstract_fn  # The same function, which ``triton_op`` registers for fake tensors.
    own = defined._backend_fns
    return own.get("cuda") or own.get(None) if defined._abstract_fn is None else None


def _marked(out: Any) -> Any:
    for t in tensors_of(out):
        if isinstance(t, FakeTensor):
            mark(t)
    return out


def _as_positions(index: Any) -> tuple[Any, ...]:
    """Convert a boolean mask to one index tensor per dimension, as CUDA does."""
    if not isinstance(index, Tensor) or index.dtype not in (torch.bool, torch.uint8):
        return (index,)
    return torch.nonzero(index).unbind(1)


def _check_sides(func: Any, args: Any, kwargs: Any) -> None:
    """Raise RuntimeError for tensors on both host and device, except scalars, as CUDA does."""
    name = func._schema.name
    if name in ACROSS_SIDES or name.startswith(("aten::_foreach", "aten::_fused", "aten::_amp")):
        return
    tensors = tensors_of((args, kwargs))
    if any(is_device(t) for t in tensors) and any(t.dim() and (is_host(t) or is_marked(t)) for t in tensors):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"cuda:0 and cpu! ({func})"
        )


def _changes_nothing(t: Tensor, kwargs: dict[str, Any]) -> bool:
    """Return whether a conversion keeps the tensor's dtype and memory format."""
    keeps_format = kwargs.get("memory_format") in (None, torch.preserve_format)
    return keeps_format and kwargs.get("dtype") in (None, t.dtype)
