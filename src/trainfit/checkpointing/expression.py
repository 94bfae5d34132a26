"""Lazy saved tensors: an expression holds a tensor of the forward or recomputes it in the backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

PLAIN_VALUES = frozenset({int, float, bool, str, torch.dtype, torch.device})


class Expression:
    """A tensor of the forward, held or recomputed by running its operation on other expressions."""

    __slots__ = (
        "__weakref__", "address", "call", "fetch", "index", "is_held", "is_stale", "num_bytes", "seen",
        "storage", "uses", "value",
    )  # fmt: skip

    def __init__(self, t: Tensor, call: Call | None, index: int | None):
        self.call, self.index = call, index
        self.value: Tensor | None = None
        self.is_held = self.is_stale = False
        """Held: saved until the backward ends. Stale: an in-place operation changed the tensor."""
        self.uses = 0  # Remaining uses, by the backward and by other expressions
        self.fetch: Callable[[], None] | None = None  # Copies an offloaded value back to the device
        self.seen = TensorWeakRef(t)
        storage = t.untyped_storage()
        self.storage = weakref.ref(storage)
        """Dead once the memory is freed, whose address another storage may get."""
        self.address, self.num_bytes = storage._cdata, storage.nbytes()

    def reserve(self) -> None:
        """Add a use."""
        self.uses += 1
        if self.uses == 1 and self.value is None and not self.fetch:
            for expression in self._inputs():
                expression.reserve()

    def take(self) -> Tensor:
        """Return the tensor for one use, recomputed if necessary; it is kept until the last use."""
        if self.fetch is not None:
            self.fetch()
        self.uses -= 1
        if self.value is None:
            assert self.call is not None, "an expression without a call is held"
            self.call.run(self)
        t = self.value
        assert t is not None
        self._release_unused()
        return t

    def drop(self) -> None:
        """Remove a use without taking the tensor."""
        self.uses -= 1
        if not self.uses and self.value is None and not self.fetch:
            for expression in self._inputs():
                expression.drop()
        self._release_unused()

    def _release_unused(self) -> None:
        if not self.uses and not self.is_held:
            self.value = None

    def _inputs(self) -> list[Expression]:
        return self.call.inputs() if self.call is not None else []


class Call:
    """An operation of the forward with expressions as its tensors."""

    __slots__ = ("args", "func", "kwargs", "results")

    def __init__(self, func: Any, args: Any, kwargs: Any):
        self.func, self.args, self.kwargs = func, args, kwargs
        self.results: list[weakref.ref[Expression]] = []  # Weak: an expression holds its call.

    def inputs(self) -> list[Expression]:
        """Return the expressions among the arguments, one entry for each occurrence."""
        found: list[Expression] = []
        mapped((self.args, self.kwargs), Expression, found.append)
        return found

    def run(self, wanted: Expression) -> None:
        """Compute ``wanted`` and any other result that has uses."""
        args, kwargs = mapped((self.args, self.kwargs), Expression, Expression.take)
        # Below autograd, where the call was recorded: above it composite operations decompose differently.
        with torch._C._AutoDispatchBelowAutograd():
            out = self.func(*args, **kwargs)
        for result in (reference() for reference in self.results):
            if result is None or (result is not wanted and (not result.uses or result.value is not None)):
                continue
            result.value = out if result.index is None else out[result.index]
            if result is not wanted:
                for expression in self.inputs():
                    expression.drop()  # This run took the inputs for both results.


def mapped(value: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """Apply ``function`` to the arguments of a type, also within lists, tuples and dicts."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, list | tuple):
        return [
            item if item is None or type(item) in PLAIN_VALUES else mapped(item, kind, function)
            for item in value
        ]
    if isinstance(value, dict):
        return {name: mapped(item, kind, function) for name, item in value.items()}
    return value
