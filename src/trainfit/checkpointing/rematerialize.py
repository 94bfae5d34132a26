"""Recompute a block's saved tensors one by one where no matrix product is needed.

A dispatch mode records how each tensor of a block's forward was computed. If a tensor that autograd saves
follows by elementwise work from other saved tensors, its expression is saved instead and evaluated in the
backward. Matrix products, attention, random draws and unknown operations are never recomputed. Related:
Korthikanti et al., https://arxiv.org/abs/2205.05198, section 4;
Jain et al., https://arxiv.org/abs/1910.02653.
Results are bitwise equal: the same operations run below autocast and autograd.

Example: a gated feed-forward network ``down(silu(g) * u)``, where g and u are products.

    autograd saves  for the backward of  here
    g               silu                 held: a product
    silu(g)         silu(g) * u          expression: silu of g
    u               silu(g) * u          held: a product
    silu(g) * u     down                 expression: silu of g, times u

Two of four tensors stay in memory; the other two are computed again when the backward asks for them.
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
from trainfit.virtual.cuda.op_kinds import FACTORIES, base_name, does_no_matrix_work, is_elsewhere, written
from trainfit.virtual.trace.tensors import tensors_of

SMALL = 1 / 16  # Share of the block's input; smaller tensors are always saved


class SavedTensorMode(TorchDispatchMode):
    """Decide for one forward of a block which tensors are saved and which are recomputed.

    Args:
        first: the block's input.
        shared: tensors that stay alive anyway: parameters and inputs common to all blocks.
        recompute: False saves every tensor that autograd saves.
        on_hold: called with each expression that is held, and its tensor.
    """

    def __init__(
        self,
        first: Tensor,
        shared: Iterable[Tensor],
        *,
        recompute: bool = True,
        on_hold: Callable[[Expression, Tensor], None] = lambda expression, t: None,
    ):
        super().__init__()
        self._recompute = recompute
        self._known: dict[Any, Expression] = {}
        self._of_storage: dict[int, list[Expression]] = {}
        self._held: set[int] = set()
        self._small = first.numel() * first.element_size() * SMALL
        self._shared = {address(t) for t in shared if is_plain(t)}
        self._on_hold = on_hold
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._save, Expression.take)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Omit the guard around each operation: nothing is compiled in here."""
        return False

    def __enter__(self) -> SavedTensorMode:
        self._hooks.__enter__()
        return super().__enter__() if self._recompute else self

    def __exit__(self, *error: Any) -> None:
        if self._recompute:
            super().__exit__(*error)
        self._hooks.__exit__(*error)
        self._known.clear()
        self._of_storage.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Before the operation runs, which may write its inputs.
        call = Call(func, *mapped((args, kwargs), Tensor, self._find)) if can_run_again(func) else None
        out = func(*args, **kwargs)
        if func._schema.is_mutable:
            self._mark_stale(func, args, kwargs)
        if isinstance(out, Tensor):
            self._add(out, call, None)
        elif isinstance(out, tuple | list):
            for index, t in enumerate(out):
                if isinstance(t, Tensor):
                    self._add(t, call, index)
        return out

    def _add(self, t: Tensor, call: Call | None, index: int | None) -> Expression:
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
        # From outside the block, or a wrapper subclass.
        expression = self._add(t, None, None)
        if expression.address in self._shared:
            expression.value, expression.is_held = t, True
        return expression

    def _save(self, t: Tensor) -> Expression:
        """Return the expression that autograd saves in place of a tensor."""
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
        """Return the expressions of fewest bytes to hold for a recomputation; None: it is impossible."""
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
        """Return the bytes that holding the expressions adds."""
        sizes = {e.address: e.num_bytes for e in expressions}
        return sum(size for storage, size in sizes.items() if storage not in self._held)

    def _hold(self, expression: Expression, t: Any) -> None:
        expression.value, expression.is_held = t, True
        expression.call = None  # Its inputs are no longer needed for it.
        self._held.add(expression.address)
        if expression.address not in self._shared:
            self._on_hold(expression, t)

    def _mark_stale(self, func: Any, args: Any, kwargs: Any) -> None:
        """Mark the expressions of tensors that the operation wrote into as stale."""
        for t in tensors_of(written(func, args, kwargs)):
            if address(t) in self._held:
                raise InputError(
                    f"this model's blocks write into tensors that their backward recomputes ({func})",
                    "use recompute: full, or full in place of elementwise",
                    field="recompute.layers",
                    value="elementwise",
                )
            for expression in self._of_storage.get(address(t), ()):
                if expression.storage() is not None:
                    expression.is_stale = True
            self._add(t, None, None)


@lru_cache(maxsize=4096)
def can_run_again(func: Any) -> bool:
    """Whether an operation is cheap, deterministic and functional."""
    return (
        isinstance(func, torch._ops.OpOverload)
        and does_no_matrix_work(func)
        and not func._schema.is_mutable
        and base_name(func) not in FACTORIES
        and not is_elsewhere(func)
        and torch.Tag.nondeterministic_seeded not in func.tags
    )


def is_plain(t: Tensor) -> bool:
    """Whether a tensor has its own storage; wrapper subclasses (quantised weights) have none."""
    return not hasattr(type(t), "__tensor_flatten__")


def address(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def key(t: Tensor) -> Any:
    """Return a key that is equal for tensors with the same storage, shape, strides and dtype."""
    return (address(t), t.storage_offset(), t.shape, t.stride(), t.dtype)
