"""One call of an operation, and the registry of rules about calls."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from trainfit.virtual.cuda.scratch.gpu_traits import GpuTraits


class Call:
    """An operation's arguments and result: fake tensors with CUDA's shapes, dtypes and strides."""

    __slots__ = ("args", "gpu", "kwargs", "name", "out")

    def __init__(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, gpu: GpuTraits | None
    ):
        self.name, self.args, self.kwargs, self.out = name, args, kwargs, out
        self.gpu: GpuTraits = gpu if gpu is not None else GpuTraits()

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        """Return an argument given by position or by name."""
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)


R = TypeVar("R")
Rule = Callable[[Call], R]


class Registry(dict[str, Rule[R]]):
    """Rules by schema name (``aten::mm``, for all overloads)."""

    def rule(self, *names: str) -> Callable[[Rule[R]], Rule[R]]:
        """Register a function as the rule of these operations; a second rule is a ValueError."""

        def add(function: Rule[R]) -> Rule[R]:
            for name in names:
                if f"aten::{name}" in self:
                    raise ValueError(f"aten::{name} has a rule already")
                self[f"aten::{name}"] = function
            return function

        return add


COPIES: Registry[tuple[int, ...]] = Registry()
"""Rules that return the bytes of each copy that is made before the results are allocated."""
SCRATCH: Registry[tuple[int, ...]] = Registry()
"""Rules that return the bytes of each scratch tensor that is allocated after the results."""
OUTPUTS: Registry[dict[int, int]] = Registry()
"""Rules that return the bytes of outputs whose size on CUDA differs, by position among the tensors."""


def num_bytes(t: Tensor, itemsize: int | None = None) -> int:
    """Return the bytes of the tensor's elements, of ``itemsize`` bytes each if given."""
    return t.numel() * (itemsize or t.element_size())


def copy_if_strided(*tensors: Tensor | None) -> tuple[int, ...]:
    """Return the bytes of the copies that ``.contiguous()`` makes of these tensors."""
    return tuple(num_bytes(t) for t in tensors if t is not None and not t.is_contiguous())


def accumulate_size(dtype: torch.dtype) -> int:
    """Return the bytes of an accumulator (``acc_type``): fp32 for 16-bit floats, int64 for integers."""
    if dtype in (torch.float16, torch.bfloat16):
        return 4
    return dtype.itemsize if dtype.is_floating_point or dtype.is_complex else 8


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    return -(-a // b) * b
