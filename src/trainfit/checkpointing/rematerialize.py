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

from trainfit.checkpointing.expression import Call, Expression, mapped
from trainfit.spec.errors import InputError
from trainfit.virtual.cuda.op_kinds import ELSEWHERE, FACTORIES, base_name, does_no_matrix_work, written
from trainfit.virtual.trace.tensors import tensors_of

SMALL = 1 / 16
"""Of the block's input: what is smaller is saved as it is."""


class SavedTensorMode(TorchDispatchMode):
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

    def __enter__(self) -> SavedTensorMode:
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
        for t in tensors_of(written(func, args, kwargs)):
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
