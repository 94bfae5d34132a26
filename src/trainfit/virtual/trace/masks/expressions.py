"""Values of fake tensors that follow from shapes alone, as functions of their indices.

A mask consists of positions, comparisons and constants. Its shape may be that of the scores, too large to
compute, but an ``Expression`` computes any of its elements. Equal expressions of one ``Expressions`` are the
same object. None of them refers to a fake tensor.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainfit.virtual.trace.masks.rules import Expression, OpCall, Values, rule_of


class Expressions:
    """Cache of expressions."""

    def __init__(self) -> None:
        self._cache: dict[Any, Expression | None] = {}

    def constant(self, shape: Any, dtype: torch.dtype, value: bool | int | float) -> Expression:
        """Return the expression of a tensor of equal elements."""
        key = ("constant", tuple(shape), dtype, value)
        expression = self._get(key, lambda: lambda _: torch.tensor(value))
        assert expression is not None
        return expression

    def values(self, real: Tensor) -> Expression:
        """Return the expression of a real tensor, which is kept alive."""
        key = ("values", tuple(real.shape), real.dtype, real.item() if real.numel() == 1 else id(real))
        expression = self._get(key, lambda: lambda at: real[at] if at else real)
        assert expression is not None
        return expression

    def result(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shape: Any, dtype: torch.dtype
    ) -> Expression | None:
        """Return the expression of an operation's result; None if it has none.

        Args:
            args, kwargs: the operation's, with an ``Expression`` for each tensor.
        """
        rule = rule_of(func)
        if rule is None:
            return None
        call = OpCall(func, args, kwargs, tuple(shape))
        return self._get((func, call.shape, dtype, _hashable(args), _hashable(kwargs)), lambda: rule(call))

    def _get(self, key: tuple[Any, ...], make: Callable[[], Values | None]) -> Expression | None:
        if key not in self._cache:
            at = make()
            shape, dtype = key[1], key[2]
            self._cache[key] = at and Expression(shape, dtype, lambda c: at(c).to(dtype))
        return self._cache[key]


def _hashable(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_hashable(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, _hashable(item)) for name, item in value.items())
    return (type(value), value) if isinstance(value, bool | int | float) else value
