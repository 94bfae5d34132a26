"""Host tensors and known values inside the virtual GPU.

Fake tensors are on the device, real ones on the host. A factory without a device, or with the text "cpu",
makes a host tensor (AdamW's step counters); one with a torch.device, or inside ``with torch.device(...)``, a
device tensor. Small device tensors computed from host values alone (positions, masks of ones) carry their
values, so that code which reads them (``if mask.all():``) branches as on the GPU.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partialmethod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from trainfit.virtual.cuda.op_kinds import UNWRITTEN, base_name
from trainfit.virtual.trace.exclusive import replaced
from trainfit.virtual.trace.host_random import draw
from trainfit.virtual.trace.tensors import tensors_of

aten = torch.ops.aten
FACTORIES = frozenset(
    getattr(torch, name)
    for name in (
        "tensor scalar_tensor zeros ones empty full arange linspace logspace rand randn randint randperm eye "
        "tril_indices triu_indices as_tensor from_numpy empty_strided"
    ).split()
)
MOVES = frozenset({torch.Tensor.to, torch.Tensor.cuda})
BACKWARDS = frozenset({torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad})
MAX_VALUES = 1 << 22
"""Elements of the largest tensor that carries its values."""
DECIDED = {
    aten.bitwise_or.Tensor: True, aten.bitwise_or_.Tensor: True, aten.logical_or.default: True,
    aten.bitwise_and.Tensor: False, aten.bitwise_and_.Tensor: False, aten.logical_and.default: False,
}  # fmt: skip
"""Operations -> the value that decides the result if one whole input has it. So generation's stopping
criteria end all sequences at the greatest length."""
FILLED: dict[Any, Callable[..., Tensor]] = {
    aten.ones_like.default: torch.ones, aten.zeros_like.default: torch.zeros,
    aten.full_like.default: torch.full,
}  # fmt: skip
"""Factories of tensors like another -> the function that makes a tensor of one element."""
VALUE = "_trainfit_value"
ASSUMED = "_trainfit_assumed"
"""Attribute of a tensor with unknown values: the values that reading it gives. Without it they are zeros."""
EQUALS = {
    aten.eq.Tensor: False, aten.eq.Scalar: False, aten.ne.Tensor: True, aten.ne.Scalar: True,
    aten.isin.Tensor_Tensor: False, aten.isin.Tensor_Scalar: False, aten.isin.Scalar_Tensor: False,
}  # fmt: skip
"""Comparisons -> their assumed result on unknown values."""
COMPARES = frozenset(
    getattr(getattr(aten, name), kind) for name in ("lt", "le", "gt", "ge") for kind in ("Tensor", "Scalar")
)
"""Comparisons that take unknown values as zeros."""
MAX_ASSUMED = 1 << 16
"""Elements of the largest tensor of assumed values."""
OVERWRITTEN = "_trainfit_overwritten"
"""Set on the storage of values that were overwritten with unknown ones."""


class HostTensorMode(TorchFunctionMode):
    """Tracks which factory calls make host tensors and which host tensors move to the device."""

    def __init__(self, placement: "PlacementState"):
        super().__init__()
        self._placement = placement

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in FACTORIES and kwargs.get("device") in (None, "cpu"):
            with self._placement.host():
                return func(*args, **kwargs)
        is_cuda = func is torch.Tensor.cuda
        if func in MOVES and is_host(args[0]) and (is_cuda or _names_device(args[1:], kwargs)):
            with self._placement.moving():
                return args[0].clone() if is_cuda else args[0].to(*args[1:], **{**kwargs, "copy": True})
        if func is torch.Tensor.__deepcopy__ and isinstance(args[0], FakeTensor):
            return deep_copy(*args)
        if func in BACKWARDS:
            with self._in_engine((args[:1], kwargs)):
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    @contextmanager
    def _in_engine(self, roots: Any) -> Iterator[None]:
        """Enter the mode, which is off while it handles a backward, for its hooks and recomputation.

        ``roots``: the arguments with the tensors that the backward starts from.
        """
        module: Any = torch.autograd
        original = module._engine_run_backward

        def run(*args: Any, **kwargs: Any) -> Any:
            # A backward inside a backward (reentrant checkpointing) runs inside the outer one's ``run``.
            is_entered = self in torch.overrides._get_current_function_mode_stack()
            with contextlib.nullcontext() if is_entered else self:
                return original(*args, **kwargs)

        with replaced(module, "_engine_run_backward", run):
            yield


def deep_copy(t: Tensor, memo: dict[int, Any]) -> Any:
    """Return ``copy.deepcopy`` of a fake tensor or parameter, for which PyTorch reads its address."""
    if id(t) not in memo:
        with torch.no_grad():
            copied = t.detach().clone()
        if isinstance(t, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, t.requires_grad)
        copied.requires_grad_(t.requires_grad)
        for name, value in vars(t).items():
            vars(copied).setdefault(name, value)
        memo[id(t)] = copied
    return memo[id(t)]


class PlacementState:
    """Where the running call puts tensors: each context sets its flag."""

    def __init__(self) -> None:
        self.on_host = False
        """New tensors are host tensors."""
        self.is_moving = False
        """A host tensor is being moved to the device."""
        self.is_leaving = False
        """A device tensor of user code is being moved to the host, as a fake one."""

    @contextmanager
    def _during(self, flag: str) -> Iterator[None]:
        before = getattr(self, flag)
        setattr(self, flag, True)
        try:
            yield
        finally:
            setattr(self, flag, before)

    host = partialmethod(_during, "on_host")
    moving = partialmethod(_during, "is_moving")
    leaving = partialmethod(_during, "is_leaving")


def is_host(value: Any) -> bool:
    """Return whether a value is a real tensor, which is on the host."""
    return isinstance(value, Tensor) and not isinstance(value, FakeTensor)


def on_host(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run an operation on real tensors."""
    with _disable_current_modes():
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            return draw(func, args, kwargs)
        return func(*args, **kwargs)


def carry_values(func: Any, args: Any, kwargs: Any, tensors: list[Tensor], out: Any) -> None:
    """Attach the values of ``out`` if it is small and the values of all inputs (``tensors``) are known."""
    if not isinstance(out, FakeTensor):
        if func._schema.is_mutable:
            _carry_overwritten(func, args, kwargs, tensors)
        return
    if out.numel() > MAX_VALUES:
        return
    if torch.Tag.nondeterministic_seeded in func.tags or base_name(func) in UNWRITTEN:
        return
    if func in FILLED and out.numel() == 1:
        # The values of the tensor that it is like do not matter: the gradient of a loss is 1.
        sizes = (out.shape, *args[1:2]) if func is aten.full_like.default else (out.shape,)
        setattr(out, VALUE, on_host(FILLED[func], sizes, {"dtype": out.dtype}))
        return
    if any(carried_values(t) is None for t in tensors):
        decided = DECIDED.get(func)
        is_decided = decided is not None and any(_is_all(t, decided) for t in tensors)
        seen = None if is_decided or out.numel() > MAX_ASSUMED else _assumed(func, args, kwargs, tensors, out)
        if func._schema.is_mutable:
            forget_values(out)
        if is_decided:
            setattr(out, VALUE, on_host(torch.full, (out.shape, decided), {"dtype": out.dtype}))
        elif seen is not None:
            setattr(out, ASSUMED, seen)
        return
    real_args, real_kwargs = tree_map_only(Tensor, carried_values, (args, kwargs))
    try:
        setattr(out, VALUE, on_host(func, real_args, real_kwargs))
    except NotImplementedError:  # A CPU has no kernel of some operations, such as products with out_dtype.
        if func._schema.is_mutable:
            forget_values(out)


def _assumed(func: Any, args: Any, kwargs: Any, tensors: list[Tensor], out: Tensor) -> Tensor | None:
    """Return the values that reading ``out`` gives, consistent with those of its inputs; None: zeros.

    An unknown value differs from all others: a sampled token does not end its sequence.
    """
    follows = func in COMPARES or any(hasattr(t, ASSUMED) for t in tensors)
    if follows and base_name(func) == "index_put" and _selects_nothing(args[1]):
        kept = seen_values(args[0])
        return None if kept is None else on_host(kept.clone, (), {})
    if follows and all(t.numel() <= MAX_ASSUMED for t in tensors):
        seen_args, seen_kwargs = tree_map_only(Tensor, _seen_or_zeros, (args, kwargs))
        with contextlib.suppress(RuntimeError):  # Zeros may be invalid, such as in a division or as a size
            return on_host(func, seen_args, seen_kwargs)
    if func not in EQUALS:
        return None
    is_same = func in (aten.eq.Tensor, aten.ne.Tensor) and args[0] is args[1]  # isfinite, isnan
    return on_host(torch.full, (out.shape, EQUALS[func] != is_same), {"dtype": out.dtype})


def _seen_or_zeros(t: Tensor) -> Tensor:
    seen = seen_values(t)
    return on_host(torch.zeros, (t.shape,), {"dtype": t.dtype}) if seen is None else seen


def _selects_nothing(indices: Any) -> bool:
    masks = [t for t in indices if t is not None and t.dtype == torch.bool]
    seen = [seen_values(t) for t in masks]
    return any(t is not None and not on_host(lambda t=t: bool(t.any()), (), {}) for t in seen)


def _is_all(t: Tensor, value: bool) -> bool:
    """Return whether all elements of a boolean tensor are known to have a value."""
    known = carried_values(t) if t.dtype == torch.bool else None
    return known is not None and on_host(lambda: bool((known == value).all()), (), {})


def _carry_overwritten(func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> None:
    """Overwrite the values that tensors carry, in an operation on lists, or mark them as unknown."""
    given = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    writes = (a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    written = [value for name in writes for value in tensors_of(given.get(name)) if hasattr(value, VALUE)]
    if not written:
        return
    if torch.Tag.nondeterministic_seeded in func.tags or any(carried_values(t) is None for t in tensors):
        for t in written:
            forget_values(t)
    else:
        on_host(func, *tree_map_only(Tensor, carried_values, (args, kwargs)))


def forget_values(t: Tensor) -> None:
    """Mark the values of a tensor, and of tensors that share its memory, as overwritten with unknown ones."""
    for name in (VALUE, ASSUMED):
        known = getattr(t, name, None)
        if known is not None:
            setattr(known.untyped_storage(), OVERWRITTEN, True)


def known_value(t: Tensor) -> Any:
    """Return the Python value of a one-element tensor; None if unknown."""
    values = carried_values(t)
    return None if values is None else on_host(values.item, (), {})


def known_highest(t: Tensor) -> int | None:
    """Return the largest value of an integer tensor; None if unknown or empty."""
    values = carried_values(t)
    return None if values is None or not t.numel() else on_host(lambda: values.max().item(), (), {})


def carried_values(t: Tensor) -> Tensor | None:
    """Return a tensor's values, its own or those it carries; None if unknown."""
    values = t if is_host(t) else getattr(t, VALUE, None)
    return None if values is None or hasattr(values.untyped_storage(), OVERWRITTEN) else values


def seen_values(t: Tensor) -> Tensor | None:
    """Return the values that reading a tensor gives: those that it carries or is assumed to have."""
    known = carried_values(t)
    if known is None:
        known = getattr(t, ASSUMED, None)
        known = None if known is None or hasattr(known.untyped_storage(), OVERWRITTEN) else known
    return known


def _names_device(args: Any, kwargs: Any) -> bool:
    if kwargs.get("device") is not None:
        return True
    return any(isinstance(value, torch.device | str | FakeTensor) for value in args)
