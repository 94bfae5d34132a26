"""Device placement in user code: factories, ``.to``, ``.cuda()``, ``.cpu()``, ``.device`` on fake CPU
tensors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.utils._device as default_device
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from trainfit.spec.errors import InputError
from trainfit.user.placement import (
    CPU,
    CUDA,
    LARGEST_REAL_BYTES,
    device_of,
    is_device,
    is_marked,
    local_of,
    names_cuda,
    names_host,
)
from trainfit.virtual.trace.host_tensors import (
    FACTORIES,
    HostTensorMode,
    PlacementState,
    deep_copy,
    on_host,
    seen_values,
)

PARSE_TO: Callable[..., Any] = torch._C._nn._parse_to  # pyright: ignore[reportAttributeAccessIssue]
TO = torch.Tensor.to
"""The base class's method; that of a subclass (bitsandbytes' Int8Params) calls it."""
FROM_DATA = frozenset({torch.tensor, torch.as_tensor, torch.asarray})
NEW = frozenset(getattr(torch.Tensor, f"new_{name}") for name in ("tensor", "zeros", "ones", "full", "empty"))
LIKE = frozenset(
    getattr(torch, f"{name}_like") for name in ("zeros", "ones", "empty", "full", "rand", "randn", "randint")
)


class UserTensorMode(HostTensorMode):
    """Translates devices in calls of user code.

    Args:
        on_engine: returns a context for each run of autograd's engine, given the arguments that hold its
            roots.
        twin: returns a fake host tensor like a real one.
        host_waits: called where the host waits until the GPU has finished all issued work.
    """

    def __init__(
        self,
        placement: PlacementState,
        on_engine: Callable[[Any], Any],
        twin: Callable[[Tensor], Tensor],
        host_waits: Callable[[], None],
    ):
        super().__init__(placement)
        self._placement, self._on_engine, self._twin = placement, on_engine, twin
        self._host_waits = host_waits
        self._calls: dict[Any, Callable[..., Any]] = {
            torch.Tensor.to: self._to,
            torch.Tensor.cuda: self._cuda,
            torch.Tensor.cpu: lambda t, **_: self._move(t, CPU, {}),
            torch.Tensor.pin_memory: lambda t, *_, **__: t,
            torch.Tensor.is_pinned: lambda t, *_, **__: False,
            torch.Tensor.numpy: self._numpy,
            torch.Tensor.__array__: lambda t, dtype=None, **_: np.asarray(self._numpy(t), dtype),
            torch.Tensor.data_ptr: _address,
            torch.Tensor.get_device: lambda t: 0 if is_device(t) else -1,
            torch.Tensor.__deepcopy__: self._deepcopy,
            torch.Tensor.__format__: self._format,
            PARSE_TO: _parse_to,
            torch.device: _device,
            _setter("data"): self._set_data,
            _getter("is_cuda"): is_device,
            _getter("is_cpu"): lambda t: device_of(t).type == "cpu",
            _getter("device"): device_of,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._calls:
            return self._calls[func](*args, **kwargs)
        if func in FACTORIES or func in FROM_DATA:
            return self._make(func, args, kwargs)
        if func in NEW or func in LIKE:
            return self._make_alike(func, args, kwargs)
        return super().__torch_function__(func, types, args, kwargs)

    @contextmanager
    def _in_engine(self, roots: Any) -> Iterator[None]:
        with super()._in_engine(roots), self._on_engine(roots):
            yield

    def _make(self, func: Any, args: Any, kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is None and func is not torch.from_numpy:
            # From torch.set_default_device or ``with torch.device(...)``.
            device = default_device.CURRENT_DEVICE
        kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
        if func in FROM_DATA and args and isinstance(args[0], Tensor):
            target = device_of(args[0]) if device is None else device
            options = {"dtype": kwargs.get("dtype"), "copy": func is torch.tensor}
            return self._move(args[0].detach(), target, options)
        if names_cuda(device):
            if func in FROM_DATA:
                made = self._make(func, args, {**kwargs, "device": CPU})
                return self._move(made.detach(), device, {}).requires_grad_(made.requires_grad)
            return func(*args, **{**kwargs, "device": CPU})
        if not names_host(device) or is_device(kwargs.get("out")):
            return func(*args, **kwargs)
        with self._placement.host():
            return func(*args, **kwargs)

    def _make_alike(self, func: Any, args: Any, kwargs: Any) -> Any:
        like, device = args[0], kwargs.get("device")
        if device is None or names_cuda(device) == is_device(like):
            return func(*args, **(kwargs | {"device": CPU} if names_cuda(device) else kwargs))
        if names_cuda(device):
            with self._placement.moving():
                return func(*args, **{**kwargs, "device": CPU})
        if names_host(device):
            with self._placement.host():
                shape = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
            return func(shape, *args[1:], **{**kwargs, "device": CPU})
        return func(*args, **kwargs)

    def _to(self, t: Tensor, *args: Any, **kwargs: Any) -> Any:
        other = kwargs.pop("other", next((a for a in args if isinstance(a, Tensor)), None))
        if other is not None:
            rest = [a for a in args if a is not other]
            return self._to(t, device_of(other), other.dtype, *rest, **kwargs)
        device = kwargs.pop("device", None)
        if args and (names_cuda(args[0]) or isinstance(args[0], str | torch.device) or args[0] is None):
            device, args = args[0], args[1:]
        rest = dict(zip(("dtype", "non_blocking", "copy"), args, strict=False)) | kwargs
        return self._move(t, device_of(t) if device is None else device, rest)

    def _cuda(
        self,
        t: Tensor,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: Any = None,
        **_: Any,
    ) -> Tensor:
        return self._move(t, "cuda", {"non_blocking": non_blocking, "memory_format": memory_format})

    def _move(self, t: Tensor, device: Any, options: dict[str, Any]) -> Tensor:
        """Return ``t.to(device, **options)``, the same tensor if nothing changes."""
        options = {name: value for name, value in options.items() if value is not None}
        if names_cuda(device) and not is_device(t) and device_of(t).type == "cpu":
            if isinstance(t, torch.nn.Parameter) and not isinstance(t, FakeTensor):
                raise InputError(
                    "a parameter created before the trace is moved to the GPU",
                    "build the model inside the callable that is traced",
                    field="step",
                )
            with self._placement.moving():
                moved = TO(t, device=CPU, **{**options, "copy": True})
            if not options.get("non_blocking"):
                self._host_waits()  # PyTorch synchronizes the stream after such a copy (Copy.cu).
            return moved
        if names_host(device) and is_device(t):
            return self._to_host(t, options)
        return TO(t, device=CPU if names_cuda(device) else device, **options)

    def _to_host(self, t: Tensor, options: dict[str, Any]) -> Tensor:
        """Return known values or zeros as a real tensor; tensors that need gradients stay fake."""
        if not options.get("non_blocking"):
            self._host_waits()
        traced = t.requires_grad and torch.is_grad_enabled()
        if traced or t.numel() * t.element_size() > LARGEST_REAL_BYTES:
            with self._placement.leaving():
                return TO(t, device=CPU, **{**options, "copy": True})
        return real_of(t).to(options.get("dtype", t.dtype))

    def _set_data(self, t: Tensor, data: Tensor) -> None:
        """Set ``t.data``; a fake tensor (a parameter) stays fake, on the data's device."""
        fake = isinstance(t, FakeTensor) and not isinstance(data, FakeTensor)
        t.data = self._twin(data) if fake else data

    def _format(self, t: Tensor, spec: str) -> str:
        return format(real_of(t) if isinstance(t, FakeTensor) else t, spec)

    def _numpy(self, t: Tensor, **kwargs: Any) -> Any:
        if is_device(t):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
        return (real_of(t) if is_marked(t) else t).numpy(**kwargs)

    def _deepcopy(self, t: Tensor, memo: dict[int, Any]) -> Any:
        if not isinstance(t, FakeTensor):
            # With the modes on, the copy of a real tensor would be fake.
            return on_host(type(t).__deepcopy__, (t, memo), {})
        return deep_copy(t, memo)


def real_of(t: Tensor) -> Tensor:
    """Return a real tensor with a fake one's values if they are known or assumed, else zeros."""
    known = seen_values(t)
    if known is not None:
        return known.clone()
    # NumPy's zeros take no memory before they are written.
    numel = t.numel() * t.element_size()
    return torch.from_numpy(np.zeros(numel, dtype=np.uint8)).view(t.dtype).view(t.shape)


def _address(t: Tensor) -> int:
    """Return a tensor's address; for a fake one, a number that only its views share."""
    local = local_of(t)
    if not isinstance(local, FakeTensor):
        return t.data_ptr()
    with torch._C.DisableTorchFunction():
        return local.untyped_storage()._cdata + int(local.storage_offset()) * local.element_size()


def _parse_to(*args: Any, **kwargs: Any) -> Any:
    """Parse the arguments of ``module.to``; PyTorch without CUDA knows no device index."""
    named = [torch.device(CUDA.type, arg) if type(arg) is int else arg for arg in args]
    return PARSE_TO(*named, **kwargs)


def _device(*args: Any, **kwargs: Any) -> torch.device:
    """Return ``torch.device(...)``; PyTorch without CUDA knows no device index alone."""
    named = args[0] if args else kwargs.get("device")
    if isinstance(named, int) and not isinstance(named, bool):
        return torch.device(CUDA.type, named)
    return torch.device(*args, **kwargs)


def _getter(name: str) -> Any:
    return getattr(torch.Tensor, name).__get__


def _setter(name: str) -> Any:
    return getattr(torch.Tensor, name).__set__
