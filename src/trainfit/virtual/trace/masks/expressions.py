"""Values of fake tensors that follow from shapes alone, as functions of their indices.

A mask is made of positions, comparisons and constants. Its shape may be that of the scores, too large to compute, but
each of its elements follows from the element's indices. An ``Expression`` computes any elements on request. Equal
expressions of one ``Expressions`` are the same object. None of them refers to a fake tensor.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainfit.virtual.trace.masks.rules import Expression, Values, rule_of


class Expressions:
    """Makes expressions, each once."""

    def __init__(self) -> None:
        self._made: dict[Any, Expression | None] = {}

    def constant(self, shape: Any, dtype: torch.dtype, value: bool | int | float) -> Expression:
        """A tensor of equal elements."""
        return self._once(("constant", tuple(shape), dtype, value), lambda: lambda _: torch.tensor(value))  # pyright: ignore[reportReturnType]

    def values(self, real: Tensor) -> Expression:
        """A real tensor's elements. It is kept alive."""
        key = ("values", tuple(real.shape), real.dtype, real.item() if real.numel() == 1 else id(real))
        return self._once(key, lambda: lambda at: real[at] if at else real)  # pyright: ignore[reportReturnType]

    def result(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shape: Any, dtype: torch.dtype
    ) -> Expression | None:
        """An operation's result, or None where it is not known element by element.

        Args:
            args, kwargs: the operation's, with an ``Expression`` for each tensor.
        """
        rule = rule_of(func)
        if rule is None:
            return None
        shape = tuple(shape)
        key = (func, shape, dtype, _hashable(args), _hashable(kwargs))
        return self._once(key, lambda: rule(func, args, kwargs, shape))

    def _once(self, key: tuple[Any, ...], make: Callable[[], Values | None]) -> Expression | None:
        if key not in self._made:
            at = make()
            shape, dtype = (key[1], key[2])
            self._made[key] = at and Expression(shape, dtype, lambda c: at(c).to(dtype))
        return self._made[key]


def is_expressible(func: Any) -> bool:
    """Whether there is a rule for this operation."""
    return rule_of(func) is not None


def _hashable(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_hashable(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, _hashable(item)) for name, item in value.items())
    return (type(value), value) if isinstance(value, bool | int | float) else value
