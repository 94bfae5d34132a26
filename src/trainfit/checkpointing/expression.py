"""Tensors of a forward as expressions: held, or made again from others when the backward asks. Not a technique by itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

PLAIN_VALUES = frozenset({int, float, bool, str, torch.dtype, torch.device})


class Expression:
    """A tensor of the forward: held, or to be had by running its operation again on other expressions."""

    __slots__ = (
        "__weakref__", "address", "call", "fetch", "index", "is_held", "is_stale", "num_bytes", "seen", "storage", "uses",
        "value",
    )  # fmt: skip

    def __init__(self, t: Tensor, call: Call | None, index: int | None):
        self.call, self.index = call, index
        self.value: Tensor | None = None
        self.is_held = self.is_stale = False
        """Held: saved for the backward, not only from one use to the next. Stale: something was written into it."""
        self.uses = 0
        """How often it will still be asked for, by the backward and to make others of it."""
        self.fetch: Callable[[], None] | None = None
        """Where its value waits elsewhere: brings it back."""
        self.seen = TensorWeakRef(t)
        storage = t.untyped_storage()
        self.storage = weakref.ref(storage)
        """Gone with its memory, whose address another storage may get."""
        self.address, self.num_bytes = storage._cdata, storage.nbytes()

    def reserve(self) -> None:
        """It will be asked for once more."""
        self.uses += 1
        if self.uses == 1 and self.value is None and not self.fetch:
            for expression in self._inputs():
                expression.reserve()

    def take(self) -> Tensor:
        """The tensor for one of its uses, made again if it is not here; it stays until the last one."""
        if self.fetch is not None:
            self.fetch()
        self.uses -= 1
        if self.value is None:
            assert self.call is not None, "what cannot be made again is held"
            self.call.run(self)
        t = self.value
        assert t is not None
        self._let_go()
        return t

    def drop(self) -> None:
        """One of its uses has no need of it any more."""
        self.uses -= 1
        if not self.uses and self.value is None and not self.fetch:
            for expression in self._inputs():
                expression.drop()
        self._let_go()

    def _let_go(self) -> None:
        if not self.uses and not self.is_held:
            self.value = None

    def _inputs(self) -> list[Expression]:
        return self.call.inputs() if self.call is not None else []


class Call:
    """An operation that ran in the forward; its tensors are expressions."""

    __slots__ = ("args", "func", "kwargs", "results")

    def __init__(self, func: Any, args: Any, kwargs: Any):
        self.func, self.args, self.kwargs = func, args, kwargs
        self.results: list[weakref.ref[Expression]] = []  # Weak: an expression holds its call.

    def inputs(self) -> list[Expression]:
        """One entry for each time that it is an argument."""
        found: list[Expression] = []
        mapped((self.args, self.kwargs), Expression, found.append)
        return found

    def run(self, wanted: Expression) -> None:
        """Give ``wanted`` its tensor, and any other result that will be asked for its own."""
        args, kwargs = mapped((self.args, self.kwargs), Expression, Expression.take)
        # From where the forward's operations were noted: composite ones of autograd's would fall apart differently.
        with torch._C._AutoDispatchBelowAutograd():
            out = self.func(*args, **kwargs)
        for result in (reference() for reference in self.results):
            if result is None or (result is not wanted and (not result.uses or result.value is not None)):
                continue
            result.value = out if result.index is None else out[result.index]
            if result is not wanted:
                for expression in self.inputs():
                    expression.drop()  # It has taken its inputs together with this one.


def mapped(value: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """Arguments of an operation, with ``function`` applied to those of a kind, within lists too."""
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
