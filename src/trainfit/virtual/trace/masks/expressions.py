"""Values of fake tensors that follow from shapes alone, as functions of their indices.

A mask may have the shape of the scores, too large to compute, but an ``Expression`` computes any of its
elements. Equal expressions of one ``Expressions`` are the same object. None of them refers to a fake tensor.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainfit.virtual.cuda.op_kinds import base_name

Coordinates = tuple[Tensor, ...]
"""One integer tensor per dimension; together they broadcast."""
LARGEST_WHOLE = 1 << 22
"""Elements of a tensor that may be computed as a whole."""
Values = Callable[[Coordinates], Tensor]


@dataclass(frozen=True, eq=False)
class Expression:
    """A tensor whose elements at given indices ``at(coordinates)`` computes on real tensors."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    at: Values


class OpCall(NamedTuple):
    """An operation with an ``Expression`` for each tensor argument, and the shape of its result."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shape: tuple[int, ...]

    def arg(self, position: int, name: str = "", default: Any = None) -> Any:
        """Return an argument given by position or by name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)


Rule = Callable[[OpCall], Values | None]
"""Returns None if the result is not expressible."""
_RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return add


def rule_of(func: Any) -> Rule | None:
    """Return the rule for an operation's result, or None."""
    if func._schema.name.partition("::")[0] not in ("aten", "prims"):
        return None
    rule = _RULES.get(base_name(func))
    return _pointwise if rule is None and torch.Tag.pointwise in func.tags else rule


def _read(x: Any, at: Coordinates) -> Any:
    """Return the operand's elements that broadcast to the result's elements ``at``."""
    if not isinstance(x, Expression):
        return x
    own = at[len(at) - len(x.shape) :] if x.shape else ()
    return x.at(tuple(_zero() if size == 1 else c for c, size in zip(own, x.shape, strict=True)))


def _zero() -> Tensor:
    return torch.zeros((), dtype=torch.int64)


@_rule(
    "where", "masked_fill", "bitwise_and", "bitwise_or", "__and__", "__or__", "__xor__", "floor_divide",
    "logical_not", "rsub",
)  # fmt: skip
def _pointwise(call: OpCall) -> Values | None:
    packets = torch.ops.prims if call.func.namespace == "prims" else torch.ops.aten
    compute = getattr(getattr(packets, base_name(call.func), None), call.func._overloadname, None)
    if compute is None or compute._schema.is_mutable:
        return None
    return lambda at: compute(*(_read(arg, at) for arg in call.args), **call.kwargs)


@_rule(
    "detach", "alias", "clone", "_to_copy", "lift_fresh", "lift_fresh_copy", "convert_element_type", "expand",
    "contiguous",
)  # fmt: skip
def _same(call: OpCall) -> Values:
    """Return the element itself; the result's dtype converts it."""
    return lambda at: _read(call.args[0], at)


@_rule("tril", "triu")
def _triangle(call: OpCall) -> Values:
    x, diagonal = call.args[0], call.arg(1, "diagonal", 0)
    lower = base_name(call.func) == "tril"

    def at(c: Coordinates) -> Tensor:
        beyond = c[-1] - c[-2] - diagonal
        return torch.where(beyond <= 0 if lower else beyond >= 0, x.at(c), 0)

    return at


def _filled(position: int | None, value: int = 0) -> Rule:
    """Return the rule of a factory that fills with ``value``, or with the argument at ``position``."""

    def rule(call: OpCall) -> Values | None:
        fill = value if position is None else call.arg(position, "fill_value")
        if fill is None:
            return None
        return lambda at: _read(fill, ()) if isinstance(fill, Expression) else torch.tensor(fill)

    return rule


_rule("zeros", "zeros_like", "new_zeros", "zero")(_filled(None, 0))
_rule("ones", "ones_like", "new_ones")(_filled(None, 1))
_rule("scalar_tensor")(_filled(0))
_rule("full", "full_like", "fill")(_filled(1))
_rule("new_full")(_filled(2))


@_rule("arange")
def _arange(call: OpCall) -> Values:
    start, step = (0, 1) if len(call.args) < 2 else (call.args[0], call.args[2] if len(call.args) > 2 else 1)
    return lambda at: start + at[0] * step


@_rule("iota")
def _iota(call: OpCall) -> Values:
    return lambda at: call.kwargs["start"] + at[0] * call.kwargs["step"]


@_rule("cumsum", "cummax", "flip", "roll", "repeat", "sum", "any", "all", "amax", "amin")
def _whole(call: OpCall) -> Values | None:
    """Compute the result as a whole, of a small tensor such as the positions."""
    x = call.args[0]
    if not isinstance(x, Expression) or max(prod(x.shape), prod(call.shape)) > LARGEST_WHOLE:
        return None

    def at(c: Coordinates) -> Tensor:
        grid = torch.meshgrid(*(torch.arange(n) for n in x.shape), indexing="ij") if x.shape else ()
        found = call.func(x.at(grid).expand(x.shape), *call.args[1:], **call.kwargs)
        found = found[0] if isinstance(found, tuple) else found
        return found[c] if c else found

    return at


@_rule("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "flatten")
def _view(call: OpCall) -> Values | None:
    x, shape = call.args[0], call.shape
    if not isinstance(x, Expression):
        return None
    if [n for n in x.shape if n != 1] == [n for n in shape if n != 1]:
        dims = [dim for dim, n in enumerate(shape) if n != 1]

        def without_ones(at: Coordinates) -> Tensor:
            dim = iter(dims)
            return x.at(tuple(_zero() if n == 1 else at[next(dim)] for n in x.shape))

        return without_ones

    def by_flat_index(at: Coordinates) -> Tensor:
        flat = _zero()
        for c, n in zip(at, shape, strict=True):
            flat = flat * n + c
        inner: list[Tensor] = []
        for n in reversed(x.shape):
            inner.append(flat % n)
            flat = flat // n
        return x.at(tuple(reversed(inner)))

    return by_flat_index


@_rule("transpose", "permute", "t")
def _permuted(call: OpCall) -> Values:
    x, rank, name = call.args[0], len(call.shape), base_name(call.func)
    order = list(range(rank))
    if name == "permute":
        order = [dim % rank for dim in call.args[1]]
    elif rank > 1:
        first, second = call.args[1:3] if name == "transpose" else (0, 1)
        order[first], order[second] = order[second % rank], order[first % rank]
    return lambda at: x.at(tuple(at[order.index(dim)] for dim in range(rank)))


@_rule("slice")
def _slice(call: OpCall) -> Values:
    x, (dim, start, _, step) = call.args[0], (*call.args[1:], *(0, None, None, 1)[len(call.args) - 1 :])
    assert dim is not None
    assert step is not None
    size = x.shape[dim]
    first = min(max(start + size if start and start < 0 else start or 0, 0), size)
    dim %= len(call.shape)
    return lambda at: x.at((*at[:dim], at[dim] * step + first, *at[dim + 1 :]))


@_rule("select")
def _select(call: OpCall) -> Values:
    x, dim, index = call.args
    dim %= len(x.shape)
    return lambda at: x.at((*at[:dim], torch.tensor(index % x.shape[dim]), *at[dim:]))


@_rule("constant_pad_nd")
def _padded(call: OpCall) -> Values:
    x, sizes, fill = call.args[0], call.args[1], call.args[2] if len(call.args) > 2 else 0
    before = [0] * len(call.shape)
    for number in range(len(sizes) // 2):
        before[len(call.shape) - 1 - number] = sizes[2 * number]

    def at(c: Coordinates) -> Tensor:
        moved = [own - first for own, first in zip(c, before, strict=True)]
        inside = torch.tensor(True)
        for own, n in zip(moved, x.shape, strict=True):
            inside = inside & (own >= 0) & (own < n)
        return torch.where(inside, x.at(_clamped(moved, x.shape)), fill)

    return at


@_rule("cat")
def _concatenated(call: OpCall) -> Values | None:
    parts, rank = call.args[0], len(call.shape)
    dim = call.arg(1, "dim", 0) % rank
    if any(len(part.shape) != rank for part in parts):
        return None

    def at(c: Coordinates) -> Tensor:
        found, first = torch.zeros(()), 0
        for part in parts:
            own = _clamped([*c[:dim], c[dim] - first, *c[dim + 1 :]], part.shape)
            found = torch.where(c[dim] >= first, part.at(own), found)
            first += part.shape[dim]
        return found

    return at


def _clamped(at: list[Tensor], shape: tuple[int, ...]) -> Coordinates:
    return tuple(c.clamp(0, max(n - 1, 0)) for c, n in zip(at, shape, strict=True))


@_rule("index")
def _gathered(call: OpCall) -> Values | None:
    """Index adjacent dimensions by integer tensors."""
    x, indices = call.args
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    first, last = dims[0], dims[-1]
    if len(dims) != last - first + 1 or any(indices[dim].dtype == torch.bool for dim in dims):
        return None
    rank = max(len(indices[dim].shape) for dim in dims)

    def at(c: Coordinates) -> Tensor:
        chosen = tuple(_read(indices[dim], c[first : first + rank]) % x.shape[dim] for dim in dims)
        return x.at((*c[:first], *chosen, *c[first + rank :]))

    return at


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
        """Return the expression of an operation's result, given one for each tensor argument; or None."""
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
