"""Model FLOPs of masked attention: propagate masks through operations to the products that they affect.

A mask tensor skips no work of a kernel, but the mathematics needs the visible pairs alone. So tensors carry a
``Mark``:

- a tensor that follows from positions alone carries its ``Expression``;
- the result of a batched product, and elementwise results of it, carry that product: they may be scores, or
  the gradient of attention's weights;
- an operation that combines scores with a mask gives the mask's visible share to its result, to the products
  before it and to the products that use it: softmax(scores + mask) @ v and all gradients.

SDPA's operations get the share of their mask argument.
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
from trainfit.virtual.trace.masks.expressions import Expression, Expressions, rule_of
from trainfit.virtual.trace.masks.visible import visible_share
from trainfit.virtual.trace.tensors import tensors_of

PRODUCTS = frozenset({"aten::bmm", "aten::baddbmm", "aten::baddbmm_"})
SOURCES = frozenset(
    """
    zeros ones full arange scalar_tensor zeros_like ones_like full_like new_zeros new_ones new_full fill zero
    iota
    """.split()
)
"""Operations that make tensors of constants or positions."""
CARRIERS = frozenset(
    """
    view _unsafe_view reshape expand unsqueeze squeeze transpose permute t slice slice_backward cat
    constant_pad_nd detach alias clone contiguous _to_copy convert_element_type copy where masked_fill
    _softmax _safe_softmax _softmax_backward_data native_dropout fma
    """.split()
)
"""Operations whose result at a pair follows from the inputs at that pair and its row, as for those tagged
pointwise."""
RESIZERS = frozenset({"cat", "constant_pad_nd", "slice", "slice_backward"})
OVERWRITING = frozenset({"aten::copy_", "aten::fill_", "aten::zero_"})
"""Operations whose result does not depend on the tensor that they write into."""
MASKING = frozenset({"add", "sub", "where", "masked_fill", "baddbmm", "fma"})
"""Operations that combine scores with a mask."""
MARK = "_trainfit_pairs"


class Mark(NamedTuple):
    """Known facts of a tensor's query-key pairs."""

    expression: Expression | None = None
    products: tuple[tuple[Any, int], ...] = ()
    """Products from which it is computed elementwise, each with its number of elements; None: a product of
    another graph."""
    share: Fraction | None = None
    """Visible share of its elements."""


class MaskTracker:
    """Propagates masks, and calls ``on_share`` with a product and the visible share of its pairs."""

    def __init__(self, on_share: Callable[[Any, Fraction], None], expressions: Expressions | None = None):
        self.on_share = on_share
        self.expressions = expressions or Expressions()
        self._shares: dict[int, tuple[Expression, Fraction]] = {}
        self._writes: dict[int, int] = {}
        """Address of a marked storage -> how often it was written into."""

    def mark_of(self, t: Any) -> Mark | None:
        """Return the tensor's mark, unless the tensor was written into since."""
        found = getattr(t, MARK, None)
        if found is None or self._writes.get(t.untyped_storage()._cdata) != found[1]:
            return None
        return found[0]

    def put(self, t: Tensor, mark: Mark) -> None:
        """Mark a tensor."""
        setattr(t, MARK, (mark, self._writes.setdefault(t.untyped_storage()._cdata, 0)))

    def visible_share(self, func: Any, args: Any, kwargs: Any) -> Fraction | None:
        """Return the visible share of the pairs of a product or an SDPA operation; None: all, or unknown."""
        name = func._schema.name
        if name in PRODUCTS:
            return _least(mark.share for t in tensors_of((args, kwargs)) if (mark := self.mark_of(t)))
        if "_attention" not in name:
            return None
        given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs
        mask = next((given[each] for each in MASKS if isinstance(given.get(each), Tensor)), None)
        known = self._expression_of(mask) if mask is not None else None
        return self._visible(known) if known else None

    def is_of_positions(self, func: Any, args: Any) -> bool:
        """Return whether a product is an outer product with positions: the angles of rotary embeddings.

        transformers 5.17 multiplies frequencies by positions as matrices, 5.23 elementwise: no model FLOPs.
        """
        if func._schema.name != "aten::bmm" or args[0].shape[2] != 1:
            return False
        marks = (self.mark_of(x) for x in args)
        return any(mark is not None and mark.expression is not None for mark in marks)

    def propagate(self, func: Any, args: Any, kwargs: Any, out: Any, product: Any) -> None:
        """Mark the result of an operation, which ``product`` identifies for ``on_share``."""
        t = out[0] if type(out) in (tuple, list) and out else out
        mark = self._mark(func, args, kwargs, t, product) if isinstance(t, FakeTensor) else None
        if func._schema.is_mutable:
            self._count_writes(func, args, kwargs)
        if mark is not None:
            self.put(t, mark)

    def _mark(self, func: Any, args: Any, kwargs: Any, out: Tensor, product: Any) -> Mark | None:
        name = func._schema.name
        read = args[0] if name == "aten::cat" else args[1:] if name in OVERWRITING else args
        marked = [(x, mark) for x in read if isinstance(x, Tensor) and (mark := self.mark_of(x)) is not None]
        if name in PRODUCTS:
            if any(mark.share is not None for _, mark in marked):
                return None
            products, share = {(product, out.numel())}, None
        elif marked or base_name(func) in SOURCES:
            products = {each for _, mark in marked for each in mark.products}
            share = _least(_scaled(mark.share, x, out, func) for x, mark in marked if mark.share is not None)
            if not products and share is None:
                expression = self._result(func, args, kwargs, out)
                return Mark(expression) if expression else None
            if base_name(func) not in CARRIERS and torch.Tag.pointwise not in func.tags:
                return None
        else:
            return None
        if base_name(func) in MASKING and any(isinstance(x, Tensor) and self._expression_of(x) for x in args):
            share = _least((share, self._share_of_mask(func, args, kwargs, out)))
        if share is None:
            return Mark(None, tuple(products))
        for each, numel in products:
            if each is not None:
                self.on_share(each, min(share * out.numel() / numel, Fraction(1)))
        return Mark(None, (), share)

    def _share_of_mask(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> Fraction | None:
        """Return the visible share after scores, taken as zeros, met a mask; None: all, or unknown."""
        mask = self._result(func, args, kwargs, out, zero_scores=True)
        share = self._visible(mask) if mask else None
        return None if share == 1 else share

    def _result(
        self, func: Any, args: Any, kwargs: Any, out: Tensor, *, zero_scores: bool = False
    ) -> Expression | None:
        """Return the result's expression; with ``zero_scores``, marked tensors without one are zeros."""
        if base_name(func) == "baddbmm":
            return self._expression_of(args[0])
        if rule_of(func) is None:
            return None

        def operand(t: Tensor) -> Expression:
            known = self._expression_of(t)
            if known is None and zero_scores and self.mark_of(t) is not None:
                known = self.expressions.constant(t.shape, t.dtype, 0)
            if known is None:
                raise LookupError
            return known

        try:
            args, kwargs = _mapped(args, operand), _mapped(kwargs, operand)
        except LookupError:
            return None
        return self.expressions.result(func, args, kwargs, out.shape, out.dtype)

    def _expression_of(self, t: Tensor) -> Expression | None:
        """Return the tensor's expression, also if its values are known instead."""
        mark = self.mark_of(t)
        if mark is not None:
            return mark.expression
        real = t if is_host(t) else carried_values(t)
        if real is None and isinstance(t, FakeTensor):
            real = t.constant  # Of ``torch.tensor(0.0)``, which FakeTensorMode keeps.
        if real is None:
            return None
        with _disable_current_modes():
            return self.expressions.values(real)

    def _visible(self, mask: Expression) -> Fraction:
        if id(mask) not in self._shares:
            with torch.no_grad(), _disable_current_modes():
                self._shares[id(mask)] = mask, visible_share(mask)
        return self._shares[id(mask)][1]

    def _count_writes(self, func: Any, args: Any, kwargs: Any) -> None:
        for t in tensors_of(written(func, args, kwargs)):
            address = t.untyped_storage()._cdata
            if address in self._writes:
                self._writes[address] += 1


def _least(shares: Any) -> Fraction | None:
    return min((share for share in shares if share is not None), default=None)


def _scaled(share: Fraction, x: Tensor, out: Tensor, func: Any) -> Fraction:
    """Return the share after hidden keys were added or removed: equally many elements are visible."""
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
