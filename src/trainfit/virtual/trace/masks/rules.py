"""Rules by which an operation's result is computed element by element from the elements of its inputs."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from trainfit.virtual.cuda.op_kinds import base_name

Coordinates = tuple[Tensor, ...]
"""One integer tensor a dimension; together they broadcast."""
LARGEST_WHOLE = 1 << 22
"""Elements of a tensor that is computed at once, all or none."""
Values = Callable[[Coordinates], Tensor]


@dataclass(frozen=True, eq=False)
class Expression:
    """A tensor's elements: ``at(coordinates)`` computes those at the given indices, on real tensors."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    at: Values


Rule = Callable[[Any, tuple[Any, ...], dict[str, Any], tuple[int, ...]], Values | None]
"""Takes the operation, its arguments with expressions for tensors, and the result's shape; None: not expressible."""
_RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return add


def rule_of(func: Any) -> Rule | None:
    """The rule for an operation's result, or None."""
    namespace, _, _ = func._schema.name.partition("::")
    if namespace not in ("aten", "prims"):
        return None
    rule = _RULES.get(base_name(func))
    return _pointwise if rule is None and torch.Tag.pointwise in func.tags else rule


def _read(x: Any, at: Coordinates) -> Any:
    """The operand's elements that broadcasting gives to the result's elements ``at``."""
    if not isinstance(x, Expression):
        return x
    own = at[len(at) - len(x.shape) :] if x.shape else ()
    return x.at(tuple(_zero() if size == 1 else c for c, size in zip(own, x.shape, strict=True)))


def _zero() -> Tensor:
    return torch.zeros((), dtype=torch.int64)


# -- elementwise --------------------------------------------------------------------------------------------------


@_rule(
    "where", "masked_fill", "bitwise_and", "bitwise_or", "__and__", "__or__", "__xor__", "floor_divide", "logical_not", "rsub",
)  # fmt: skip
def _pointwise(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shape: tuple[int, ...]
) -> Values | None:
    name = base_name(func)
    packet = getattr(torch.ops.prims if func.namespace == "prims" else torch.ops.aten, name, None)
    compute = getattr(packet, func._overloadname, None)
    if compute is None or compute._schema.is_mutable:
        return None
    return lambda at: compute(*(_read(arg, at) for arg in args), **kwargs)


@_rule(
    "detach",
    "alias",
    "clone",
    "_to_copy",
    "lift_fresh",
    "lift_fresh_copy",
    "convert_element_type",
    "expand",
    "contiguous",
)
def _same(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shape: tuple[int, ...]) -> Values | None:
    """The element itself, where ``expand`` repeats it; the result's dtype converts it."""
    return lambda at: _read(args[0], at)


@_rule("tril", "triu")
def _triangle(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shape: tuple[int, ...]
) -> Values | None:
    x, diagonal = args[0], args[1] if len(args) > 1 else kwargs.get("diagonal", 0)
    lower = base_name(func) == "tril"

    def at(c: Coordinates) -> Tensor:
        beyond = c[-1] - c[-2] - diagonal
        return torch.where(beyond <= 0 if lower else beyond >= 0, x.at(c), 0)

    return at


# -- factories ----------------------------------------------------------------------------------------------------


def _filled(place: int | None, value: int = 0) -> Rule:
    def rule(
        func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shape: tuple[int, ...]
    ) -> Values | None:
        fill = value if place is None else args[place] if len(args) > place else kwargs.get("fill_value")
        return (
            None
            if fill is None
            else lambda at: _read(fill, ()) if isinstance(fill, Expression) else torch.tensor(fill)
        )

    return rule


for _name, _place, _value in (
    ("zeros", None, 0), ("zeros_like", None, 0), ("new_zeros", None, 0), ("zero", None, 0), ("ones", None, 1),
    ("ones_like", None, 1), ("new_ones", None, 1), ("full", 1, 0), ("full_like", 1, 0), ("new_full", 2, 0), ("fill", 1, 0),
    ("scalar_tensor", 0, 0),
):  # fmt: skip
    _rule(_name)(_filled(_place, _value))


@_rule("arange")
def _arange(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shape: tuple[int, ...]
) -> Values | None:
    start, step = (0, 1) if len(args) < 2 else (args[0], args[2] if len(args) > 2 else 1)
    return lambda at: start + at[0] * step


@_rule("iota")
def _iota(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shape: tuple[int, ...]) -> Values | None:
    start, step = kwargs["start"], kwargs["step"]
    return lambda at: start + at[0] * step


@_rule("cumsum", "cummax", "flip", "roll", "repeat", "sum", "any", "all", "amax", "amin")
def _whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shape: tuple[int, ...]) -> Values | None:
    """Computed at once from all elements, of a vector such as the positions."""
    x = args[0]
    if not isinstance(x, Expression) or max(prod(x.shape), prod(shape)) > LARGEST_WHOLE:
        return None

    def at(c: Coordinates) -> Tensor:
        grid = torch.meshgrid(*(torch.arange(n) for n in x.shape), indexing="ij") if x.shape else ()
        found = func(x.at(grid).expand(x.shape), *args[1:], **kwargs)
        found = found[0] if isinstance(found, tuple) else found
        return found[c] if c else found

    return at


# -- views, slices and gathers ------------------------------------------------------------------------------------


@_rule("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "flatten")
def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shape: tuple[int, ...]) -> Values | None:
    x = args[0]
    if not isinstance(x, Expression):
        return None
    if [n for n in x.shape if n != 1] == [n for n in shape if n != 1]:
        places = [place for place, n in enumerate(shape) if n != 1]

        def without_ones(at: Coordinates) -> Tensor:
            given = iter(places)
            return x.at(tuple(_zero() if n == 1 else at[next(given)] for n in x.shape))

        return without_ones

    def by_number(at: Coordinates) -> Tensor:
        number = _zero()
        for c, n in zip(at, shape, strict=True):
            number = number * n + c
        inner: list[Tensor] = []
        for n in reversed(x.shape):
            inner.append(number % n)
            number = number // n
        return x.at(tuple(reversed(inner)))

    return by_number


@_rule("transpose", "permute", "t")
def _permuted(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shape: tuple[int, ...]
) -> Values | None:
    x, rank = args[0], len(shape)
    order = list(range(rank))
    if base_name(func) == "permute":
        order = [dim % rank for dim in args[1]]
    elif rank > 1:
        first, second = args[1:3] if base_name(func) == "transpose" else (0, 1)
        order[first], order[second] = order[second % rank], order[first % rank]
    return lambda at: x.at(tuple(at[order.index(dim)] for dim in range(rank)))


@_rule("slice")
def _slice(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shape: tuple[int, ...]) -> Values | None:
    x, (dim, start, _, step) = args[0], (*args[1:], *(0, None, None, 1)[len(args) - 1 :])
    assert dim is not None
    assert step is not None
    size = x.shape[dim]
    first = min(max(start + size if start and start < 0 else start or 0, 0), size)
    dim %= len(shape)
    return lambda at: x.at((*at[:dim], at[dim] * step + first, *at[dim + 1 :]))


@_rule("select")
def _select(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shape: tuple[int, ...]
) -> Values | None:
    x, dim, index = args
    dim %= len(x.shape)
    place = index % x.shape[dim]
    return lambda at: x.at((*at[:dim], torch.tensor(place), *at[dim:]))


@_rule("constant_pad_nd")
def _padded(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shape: tuple[int, ...]
) -> Values | None:
    x, sizes, fill = args[0], args[1], args[2] if len(args) > 2 else 0
    before = [0] * len(shape)
    for number in range(len(sizes) // 2):
        before[len(shape) - 1 - number] = sizes[2 * number]

    def at(c: Coordinates) -> Tensor:
        moved = [own - first for own, first in zip(c, before, strict=True)]
        inside = torch.tensor(True)
        for own, n in zip(moved, x.shape, strict=True):
            inside = inside & (own >= 0) & (own < n)
        return torch.where(inside, x.at(_clamped(moved, x.shape)), fill)

    return at


@_rule("cat")
def _joined(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shape: tuple[int, ...]
) -> Values | None:
    parts, dim = args[0], (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % len(shape)
    if any(len(part.shape) != len(shape) for part in parts):
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
def _gathered(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shape: tuple[int, ...]
) -> Values | None:
    """Adjacent dimensions indexed by integer tensors."""
    x, indices = args
    given = [dim for dim, index in enumerate(indices) if index is not None]
    first, last = given[0], given[-1]
    if len(given) != last - first + 1 or any(indices[dim].dtype == torch.bool for dim in given):
        return None
    rank = max(len(indices[dim].shape) for dim in given)

    def at(c: Coordinates) -> Tensor:
        chosen = tuple(_read(indices[dim], c[first : first + rank]) % x.shape[dim] for dim in given)
        return x.at((*c[:first], *chosen, *c[first + rank :]))

    return at
