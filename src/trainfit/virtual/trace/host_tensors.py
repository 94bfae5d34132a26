"""What a real run keeps on the host, and values that a run can know without data.

Inside the virtual GPU a fake tensor is a device tensor and a real one is a host tensor. What tells them apart is what
the code says: a factory called without a device, or with the text "cpu", makes a host tensor (AdamW's step counters,
``torch.tensor(0.0)``); one called with the step's device (a torch.device), or inside ``with torch.device(...)``,
makes a device tensor, and so does ``.to(device)``.

Small device tensors that follow from the host alone (positions, token ids, masks of ones) carry their values along,
so that code which asks for them (`if mask.all():`) decides as it would on the GPU.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from trainfit.virtual.trace.exclusive import replaced
from trainfit.virtual.trace.host_random import draw

FACTORIES = frozenset(
    getattr(torch, name)
    for name in (
        "tensor scalar_tensor zeros ones empty full arange linspace logspace rand randn randint randperm eye "
        "tril_indices triu_indices as_tensor from_numpy empty_strided"
    ).split()
)
MOVES = frozenset({torch.Tensor.to, torch.Tensor.cuda})
BACKWARDS = frozenset({torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad})
NOT_FILLED = (
    "aten::empty",
    "aten::empty_strided",
    "aten::empty_like",
    "aten::new_empty",
    "aten::new_empty_strided",
)
"""What these make has no values yet."""
MAX_VALUES = 1 << 22
"""Elements of the largest tensor whose values are carried along."""
VALUE = "_trainfit_value"
OVERWRITTEN = "_trainfit_overwritten"
"""Set on the storage of values that something unknown was written into."""


class HostTensorMode(TorchFunctionMode):
    """Says when a factory call makes a host tensor and when a host tensor moves to the device.

    Entered before ``with torch.device(...)`` blocks, so those have already filled in the device they name.
    """

    def __init__(self, placement: "PlacementState"):
        super().__init__()
        self._placement = placement

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in FACTORIES and kwargs.get("device") in (None, "cpu"):
            with self._placement.host():
                return func(*args, **kwargs)
        if (
            func in MOVES
            and is_host(args[0])
            and (func is torch.Tensor.cuda or _names_device(args[1:], kwargs))
        ):
            with self._placement.moving():
                return (
                    args[0].clone()
                    if func is torch.Tensor.cuda
                    else args[0].to(*args[1:], **{**kwargs, "copy": True})
                )
        if func in BACKWARDS:
            with self._in_the_engine():
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    @contextmanager
    def _in_the_engine(self) -> Iterator[None]:
        """A mode is off while it handles a call, here the whole backward: hooks and recomputation run in it."""
        module: Any = torch.autograd
        original = module._engine_run_backward

        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return original(*args, **kwargs)

        with replaced(module, "_engine_run_backward", run):
            yield


class PlacementState:
    """Whether new tensors are the host's, and whether a host tensor is on its way to the device."""

    def __init__(self) -> None:
        self.on_host = False
        self.is_moving = False

    def host(self) -> "_Flag":
        return _Flag(self, "on_host")

    def moving(self) -> "_Flag":
        return _Flag(self, "is_moving")


class _Flag:
    def __init__(self, owner: PlacementState, name: str):
        self._owner, self._name = owner, name

    def __enter__(self) -> None:
        self._before = getattr(self._owner, self._name)
        setattr(self._owner, self._name, True)

    def __exit__(self, *_: object) -> None:
        setattr(self._owner, self._name, self._before)


def is_host(value: Any) -> bool:
    """A real tensor, among fake ones, is on the host."""
    return isinstance(value, Tensor) and not isinstance(value, FakeTensor)


def on_host(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run an operation for real."""
    with _disable_current_modes():
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            return draw(func, args, kwargs)
        return func(*args, **kwargs)


def carry_values(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Give ``out`` its values if it is small and all of ``func``'s inputs have theirs."""
    if not isinstance(out, FakeTensor) or out.numel() > MAX_VALUES:
        return
    if torch.Tag.nondeterministic_seeded in func.tags or func._schema.name in NOT_FILLED:
        return
    try:
        for arg in args:
            if isinstance(arg, Tensor):
                _value(arg)  # Most are not known, and this says so sooner.
        real_args, real_kwargs = tree_map_only(Tensor, _value, (args, kwargs))
    except LookupError:
        known = getattr(out, VALUE, None)
        if known is not None and func._schema.is_mutable:
            setattr(known.untyped_storage(), OVERWRITTEN, True)
        return
    setattr(out, VALUE, on_host(func, real_args, real_kwargs))


def known_value(t: Tensor) -> Any:
    """The Python value of a one-element tensor, or None if only a run can know it."""
    try:
        return on_host(_value(t).item, (), {})
    except LookupError:
        return None


def known_highest(t: Tensor) -> int | None:
    """The largest value of an integer tensor, or None if only a run can know it."""
    try:
        value = _value(t)
        return on_host(lambda: value.max().item(), (), {}) if t.numel() else None
    except LookupError:
        return None


def carried_values(t: Tensor) -> Tensor | None:
    """The values of a tensor where they are known: a real one's own, or those carried along."""
    try:
        return _value(t)
    except LookupError:
        return None


def _value(t: Tensor) -> Tensor:
    value = t if is_host(t) else getattr(t, VALUE, None)
    if value is None or hasattr(value.untyped_storage(), OVERWRITTEN):
        raise LookupError
    return value


def _names_device(args: Any, kwargs: Any) -> bool:
    if kwargs.get("device") is not None:
        return True
    return any(isinstance(value, torch.device | str) for value in args)
