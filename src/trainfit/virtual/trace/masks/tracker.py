"""Which products of attention work on pairs that a mask hides, so that model FLOPs leave those pairs out.

A mask given as a tensor hides nothing from a kernel: it computes every score. What the mathematics needs are the visible ones.
So tensors carry a ``Mark`` from operation to operation:

- a tensor that follows from positions alone carries its ``Expression``;
- what a batched product makes, and what elementwise operations make of it, carries that product: these may be scores, or the
  gradient of attention's weights;
- where such a tensor meets a mask, the result carries the mask's visible share, the products before it get that share, and so do
  the products that use the result: softmax(scores + mask) @ v and all gradients.

SDPA's operations get the share of the mask that they are given.
"""

from collections.abc import Callable
from fractions import Fraction
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from trainfit.virtual.cuda.attention_kernel import MASKS
from trainfit.virtual.cuda.op_kinds import base_name, written
from trainfit.virtual.trace.host_tensors import carried_values, is_host
from trainfit.virtual.trace.masks.expressions import Expressions, is_expressible
from trainfit.virtual.trace.masks.rules import Expression
from trainfit.virtual.trace.masks.visible import visible_share
from trainfit.virtual.trace.tensors import tensors_of

PRODUCTS = frozenset({"aten::bmm", "aten::baddbmm", "aten::baddbmm_"})
BEGINNINGS = frozenset(
    """
    zeros ones full arange scalar_tensor zeros_like ones_like full_like new_zeros new_ones new_full fill zero iota
    """.split()
)
"""Operations that make tensors of constants or positions."""
CARRIERS = frozenset(
    """
    view _unsafe_view reshape expand unsqueeze squeeze transpose permute t slice slice_backward cat constant_pad_nd detach alias
    clone contiguous _to_copy convert_element_type copy where masked_fill _softmax _safe_softmax _softmax_backward_data
    native_dropout fma
    """.split()
)
"""Operations whose result at a pair follows from their inputs at that pair and its row; those tagged pointwise do too."""
RESIZERS = frozenset({"cat", "constant_pad_nd", "slice", "slice_backward"})
OVERWRITING = frozenset({"aten::copy_", "aten::fill_", "aten::zero_"})
"""What they write into does not matter."""
MEETINGS = frozenset({"add", "sub", "where", "masked_fill", "baddbmm", "fma"})
"""Operations that put a mask on scores."""
MARK = "_trainfit_pairs"


class Mark(NamedTuple):
    """What is known of a tensor's query-key pairs."""

    expression: Expression | None = None
    products: tuple[tuple[Any, int], ...] = ()
    """Products that made it, elementwise work aside, each with the number of elements that it made. None: not to be named."""
    share: Fraction | None = None
    """Visible share of its elements; the others count for nothing."""


class MaskTracker:
    """Follows masks through operations.

    Args:
        on_share: called with a product and the visible share of its pairs, once that is known.
    """

    def __init__(self, on_share: Callable[[Any, Fraction], None], expressions: Expressions | None = None):
        self.found = on_share
        """Call it with a product and the visible share of its pairs."""
        self.expressions = expressions or Expressions()
        self._shares: dict[int, tuple[Expression, Fraction]] = {}
        self._writes: dict[int, int] = {}
        """Of a marked storage, by address, how often it was written into."""

    def mark_of(self, t: Any) -> Mark | None:
        """The tensor's mark, unless it was written into since."""
        found = getattr(t, MARK, None)
        if found is None or self._writes.get(t.untyped_storage()._cdata) != found[1]:
            return None
        return found[0]

    def put(self, t: Tensor, mark: Mark) -> None:
        """Mark a tensor."""
        setattr(t, MARK, (mark, self._writes.setdefault(t.untyped_storage()._cdata, 0)))

    def share(self, func: Any, args: Any, kwargs: Any) -> Fraction | None:
        """Visible share of the pairs that a product or SDPA's operation works on; None: all, or not known."""
        name = func._schema.name
        if name in PRODUCTS:
            return _least(mark.share for t in tensors_of((args, kwargs)) if (mark := self.mark_of(t)))
        if "_attention" not in name:
            return None
        given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs
        mask = next((given[each] for each in MASKS if isinstance(given.get(each), Tensor)), None)
        known = self._known(mask) if mask is not None else None
        return self._visible(known) if known else None

    def follow(self, func: Any, args: Any, kwargs: Any, out: Any, product: Any) -> None:
        """Mark the result of an operation.

        Args:
            product: names the operation to ``on_share``.
        """
        t = out[0] if type(out) in (tuple, list) and out else out
        mark = self._mark(func, args, kwargs, t, product) if isinstance(t, FakeTensor) else None
        if func._schema.is_mutable:
            self._note_writes(func, args, kwargs)
        if mark is not None:
            self.put(t, mark)

    def _mark(self, func: Any, args: Any, kwargs: Any, out: Tensor, product: Any) -> Mark | None:
        """The result's mark."""
        name = func._schema.name
        read = args[0] if name == "aten::cat" else args[1:] if name in OVERWRITING else args
        marked = [(x, mark) for x in read if isinstance(x, Tensor) and (mark := self.mark_of(x)) is not None]
        if name in PRODUCTS:
            if any(mark.share is not None for _, mark in marked):
                return None
            products, share = {(product, out.numel())}, None
        elif marked or base_name(func) in BEGINNINGS:
            products = {each for _, mark in marked for each in mark.products}
            share = _least(_scaled(mark.share, x, out, func) for x, mark in marked if mark.share is not None)
            if not products and share is None:
                expression = self._expression(func, args, kwargs, out)
                return Mark(expression) if expression else None
            if base_name(func) not in CARRIERS and torch.Tag.pointwise not in func.tags:
                return None
        else:
            return None
        if base_name(func) in MEETINGS and any(isinstance(x, Tensor) and self._known(x) for x in args):
            share = _least((share, self._met(func, args, kwargs, out)))
        if share is None:
            return Mark(None, tuple(products))
        for each, numel in products:
            if each is not None:
                self.found(each, min(share * out.numel() / numel, Fraction(1)))
        return Mark(None, (), share)

    def _met(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> Fraction | None:
        """Visible share of what scores and a mask make, the scores taken as zeros; None: all is visible, or not known."""
        mask = self._expression(func, args, kwargs, out, scores=True)
        share = self._visible(mask) if mask else None
        return None if share == 1 else share

    def _expression(
        self, func: Any, args: Any, kwargs: Any, out: Tensor, *, scores: bool = False
    ) -> Expression | None:
        """The result's expression. ``scores``: with zeros for what has none."""
        if base_name(func) == "baddbmm":
            return self._known(args[0])
        if not is_expressible(func):
            return None
        try:
            known = _mapped(args, lambda t: self._operand(t, scores=scores))
            named = _mapped(kwargs, lambda t: self._operand(t, scores=scores))
        except LookupError:
            return None
        return self.expressions.result(func, known, named, out.shape, out.dtype)

    def _operand(self, t: Tensor, *, scores: bool) -> Expression:
        known = self._known(t)
        if known is None and scores and self.mark_of(t) is not None:
            known = self.expressions.constant(t.shape, t.dtype, 0)
        if known is None:
            raise LookupError
        return known

    def _known(self, t: Tensor) -> Expression | None:
        """The tensor's expression, also where its values were computed."""
        mark = self.mark_of(t)
        if mark is not None:
            return mark.expression
        real = t if is_host(t) else carried_values(t)
        if real is None:
            return None
        with _disable_current_modes():
            return self.expressions.values(real)

    def _visible(self, mask: Expression) -> Fraction:
        if id(mask) not in self._shares:
            with torch.no_grad(), _disable_current_modes():
                self._shares[id(mask)] = mask, visible_share(mask)
        return self._shares[id(mask)][1]

    def _note_writes(self, func: Any, args: Any, kwargs: Any) -> None:
        for value in written(func, args, kwargs):
            for t in tensors_of(value):
                address = t.untyped_storage()._cdata
                if address in self._writes:
                    self._writes[address] += 1


def _least(shares: Any) -> Fraction | None:
    return min((share for share in shares if share is not None), default=None)


def _scaled(share: Fraction, x: Tensor, out: Tensor, func: Any) -> Fraction:
    """The visible share after hidden keys were added or taken away: as many visible elements, of more or fewer."""
    if base_name(func) not in RESIZERS:
        return share
    return min(share * prod(x.shape[-2:]) / prod(out.shape[-2:]), Fraction(1))


def _mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(_mapped(item, change) for item in value)
    if isinstance(value, dict):
        return {name: _mapped(item, change) for name, item in value.items()}
    return value
