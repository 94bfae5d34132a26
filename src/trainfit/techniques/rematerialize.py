"""What a block's backward needs, made again piece by piece where no matrix product is in it. Not a technique by itself.

While a block's forward runs, a dispatch mode notes how each tensor came about. When autograd wants to save one, and it
follows by elementwise work (norms, activation functions, casts, rotations) from what is saved anyway, its expression is
saved in its place, and evaluated when the backward asks: nothing else of the forward runs again, and only one tensor at
a time comes back. Recomputing the cheap part is old (Korthikanti et al., https://arxiv.org/abs/2205.05198, section 4; Jain
et al., https://arxiv.org/abs/1910.02653); here no operation is named: what multiplies matrices, attends, draws random
numbers or is not known is saved, all else may be made again.

Equal to the bit: the same operations run on the same tensors, below autocast and autograd.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import TensorWeakRef

from trainfit.spec.errors import InputError
from trainfit.virtual.op_kinds import ELSEWHERE, FACTORIES, base_name, does_no_matrix_work, written

PLAIN_VALUES = frozenset({int, float, bool, str, torch.dtype, torch.device})
SMALL = 1 / 16
"""Of the block's input: what is smaller is saved as it is."""


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


class Saving(TorchDispatchMode):
    """Around one run of a block's forward: decides what of it is saved, and how.

    Args:
        first: the block's input.
        shared: tensors that live on all the same: parameters, and what every block is given.
        again: whether what can be made again is; else all that autograd saves is held.
        on_hold: hears of every expression that is held, with its tensor.
    """

    def __init__(
        self,
        first: Tensor,
        shared: Iterable[Tensor],
        *,
        again: bool = True,
        on_hold: Callable[[Expression, Tensor], None] = lambda expression, t: None,
    ):
        super().__init__()
        self._again = again
        self._known: dict[Any, Expression] = {}
        self._of_storage: dict[int, list[Expression]] = {}
        self._held: set[int] = set()
        self._small = first.numel() * first.element_size() * SMALL
        self._shared = {address(t) for t in shared if is_plain(t)}
        self._on_hold = on_hold
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._save, Expression.take)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled in here; the guard that torch would put around each operation costs as much as it."""
        return False

    def __enter__(self) -> Saving:
        self._hooks.__enter__()
        return super().__enter__() if self._again else self

    def __exit__(self, *error: Any) -> None:
        if self._again:
            super().__exit__(*error)
        self._hooks.__exit__(*error)
        # What is saved holds only itself from here on.
        self._known.clear()
        self._of_storage.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = None
        if can_run_again(func):
            # Looked up before it runs, because that is what it read.
            call = Call(func, *mapped((args, kwargs), Tensor, self._find))
        out = func(*args, **kwargs)
        if func._schema.is_mutable:
            self._changed(func, args, kwargs)
        if isinstance(out, Tensor):
            self._note(out, call, None)
        elif isinstance(out, tuple | list):
            for index, t in enumerate(out):
                if isinstance(t, Tensor):
                    self._note(t, call, index)
        return out

    def _note(self, t: Tensor, call: Call | None, index: int | None) -> Expression:
        expression = Expression(t if is_plain(t) else torch.empty(0), call, index)
        if call is not None:
            call.results.append(weakref.ref(expression))
        if is_plain(t):
            self._known[key(t)] = expression
            self._of_storage.setdefault(expression.address, []).append(expression)
        return expression

    def _find(self, t: Tensor) -> Expression:
        known = self._known.get(key(t)) if is_plain(t) else None
        if known is not None and known.storage() is not None:
            return known
        expression = self._note(
            t, None, None
        )  # It comes from outside the block, or is made of other tensors.
        if expression.address in self._shared:
            expression.value, expression.is_held = t, True
        return expression

    def _save(self, t: Tensor) -> Expression:
        """What autograd keeps in place of a tensor."""
        expression = self._find(t)
        if not is_plain(t):
            expression.value, expression.is_held = t, True
        if expression.value is None and not expression.uses:
            needed = None
            is_large = expression.num_bytes > self._small
            if is_large and expression.address not in self._held and expression.call is not None:
                needed = self._inputs_to_hold(expression.call, {})
            if needed is None or self._cost(needed) >= expression.num_bytes:
                self._hold(expression, t)
            else:
                for other in needed:
                    self._hold(other, other.seen())
        expression.reserve()
        return expression

    def _inputs_to_hold(self, call: Call, memo: dict[Expression, Any]) -> set[Expression] | None:
        """What must be held so that the operation can run again, as few bytes as can be; None: it cannot."""
        whole: set[Expression] = set()
        for expression in call.inputs():
            if expression not in memo:
                memo[expression] = self._to_hold(expression, memo)
            if memo[expression] is None:
                return None
            whole |= memo[expression]
        return whole

    def _to_hold(self, expression: Expression, memo: dict[Expression, Any]) -> set[Expression] | None:
        if expression.is_stale:
            return None
        if expression.value is not None or expression.uses:
            return set()
        itself = {expression} if expression.seen() is not None else None
        inputs = self._inputs_to_hold(expression.call, memo) if expression.call else None
        if itself is None or inputs is None:
            return itself or inputs
        return inputs if self._cost(inputs) < self._cost(itself) else itself

    def _cost(self, expressions: set[Expression]) -> int:
        """Bytes that holding them adds."""
        sizes = {e.address: e.num_bytes for e in expressions}
        return sum(size for storage, size in sizes.items() if storage not in self._held)

    def _hold(self, expression: Expression, t: Any) -> None:
        expression.value, expression.is_held = t, True
        expression.call = None  # What it was made of is no longer needed for it.
        self._held.add(expression.address)
        if expression.address not in self._shared:
            self._on_hold(expression, t)

    def _changed(self, func: Any, args: Any, kwargs: Any) -> None:
        """The operation wrote into tensors: what was noted of them is of the past."""
        for t in _tensors(written(func, args, kwargs)):
            if address(t) in self._held:
                raise InputError(
                    f"this model's blocks write into what their backward is to compute again ({func})",
                    "use recompute: full, or full in place of elementwise",
                    field="recompute.layers",
                    value="elementwise",
                )
            for expression in self._of_storage.get(address(t), ()):
                if expression.storage() is not None:
                    expression.is_stale = True
            self._note(t, None, None)


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


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    mapped(value, Tensor, found.append)
    return found


@lru_cache(maxsize=4096)
def can_run_again(func: Any) -> bool:
    """Whether an operation is cheap, gives the same each time, and says all that it reads and writes."""
    if not isinstance(func, torch._ops.OpOverload) or not does_no_matrix_work(func):
        return False
    if func._schema.is_mutable or base_name(func) in FACTORIES or func._schema.name.startswith(ELSEWHERE):
        return False
    return torch.Tag.nondeterministic_seeded not in func.tags


def is_plain(t: Tensor) -> bool:
    """Whether a tensor is its own storage and not made of others, as quantised weights are."""
    return _is_plain(type(t))


@lru_cache
def _is_plain(kind: type) -> bool:
    return not hasattr(kind, "__tensor_flatten__")


def address(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def key(t: Tensor) -> Any:
    """Equal for tensors that show the same memory in the same way."""
    return (address(t), t.storage_offset(), t.shape, t.stride(), t.dtype)
