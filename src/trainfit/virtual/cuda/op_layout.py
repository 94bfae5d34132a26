"""What an operation's speed depends on, other than bytes and FLOPs: a product's shape, layouts in memory.

The same functions describe a fake tensor's operation in the ledger and a real one that ``calibrate`` times.
"""

from typing import Any

from torch import Tensor

from trainfit.virtual.trace.tensors import tensors_of

PRODUCTS = {
    "mm": 0, "bmm": 0, "_scaled_mm": 0, "_int_mm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1, "_grouped_mm": 0,
}  # fmt: skip
"""Name of an operation of aten -> position of the first factor."""
REDUCTIONS = frozenset(
    {"sum", "mean", "amax", "linalg_vector_norm", "_softmax", "_log_softmax", "norm", "var"}
)


def product_shape(func: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
    """Return batch, m, n, k of a matrix product; empty for other operations."""
    factors = _factors(func, args)
    if factors is None:
        return ()
    a, b = factors
    batch = max(a.shape[0] if a.ndim == 3 else 1, b.shape[0] if b.ndim == 3 else 1)
    return batch, a.shape[-2], b.shape[-1], a.shape[-1]


def layout(func: Any, args: tuple[Any, ...], out: Any) -> str:
    """Return how an operation's tensors lie in memory.

    Of a product: ``n`` or ``t`` for each factor, stored by rows or by columns. Of other operations:
    ``strided`` where elements are not read in the order of memory, ``outer`` where a reduction keeps the last
    dimension, ``mixed`` where dtypes differ, ``broadcast`` where a tensor is expanded; else empty.
    """
    factors = _factors(func, args)
    if factors is not None:
        return "".join("t" if each.stride(-1) != 1 and each.stride(-2) == 1 else "n" for each in factors)
    inputs = tensors_of(args)
    if not inputs or not isinstance(out, Tensor):
        return ""
    orders = {id(each): _order(each) for each in (*inputs, out)}
    if None in orders.values():
        return "strided"
    name = func._schema.name.partition("::")[2]
    if name in REDUCTIONS:
        return "outer" if out.ndim and inputs[0].ndim and out.shape[-1:] == inputs[0].shape[-1:] else ""
    # A scalar tensor is no operand of size.
    sized = [each for each in (*inputs, out) if each.ndim]
    if len({each.dtype for each in sized if each.is_floating_point()}) > 1:
        return "mixed"
    if any(orders[id(each)] != orders[id(out)] for each in sized if each.shape == out.shape):
        return "strided"
    return "broadcast" if any(each.shape != out.shape or 0 in each.stride() for each in sized) else ""


def _factors(func: Any, args: tuple[Any, ...]) -> tuple[Tensor, Tensor] | None:
    namespace, _, name = func._schema.name.partition("::")
    at = PRODUCTS.get(name) if namespace == "aten" else None
    if at is None or len(args) < at + 2:
        return None
    a, b = args[at], args[at + 1]
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.ndim < 2 or b.ndim < 2:
        return None
    return a, b


def _order(t: Tensor) -> tuple[int, ...] | None:
    """Return the dimensions longer than 1 in the order of memory; None where elements are left out.

    A dimension of stride 0 is expanded, and no part of the order.
    """
    if t.is_contiguous():
        return tuple(at for at, length in enumerate(t.shape) if length > 1)
    long = [at for at, length in enumerate(t.shape) if length > 1 and t.stride(at)]
    size, order = 1, sorted(long, key=lambda at: -t.stride(at))
    for at in reversed(order):
        if t.stride(at) != size:
            return None
        size *= t.shape[at]
    return tuple(order)
