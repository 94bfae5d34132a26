"""Properties that decide an operation's speed, other than bytes and FLOPs: a product's shape, dtype, layouts.

The same functions describe a fake tensor's operation in the ledger and a real one that ``calibrate`` times.
"""

from math import prod
from typing import Any

import torch
from torch import Tensor

from trainfit.virtual.cuda import recurrent
from trainfit.virtual.cuda.op_kinds import CHANNELS_LAST, POINTWISE
from trainfit.virtual.trace.tensors import tensors_of

PRODUCTS = {
    "mm": 0, "bmm": 0, "_scaled_mm": 0, "_int_mm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1, "_grouped_mm": 0,
}  # fmt: skip
"""Name of an operation of aten -> position of the first factor."""
WEIGHT_GRADIENT = "trainfit::add_weight_gradient_"
"""The product of the transposed second argument and the third, added to the first."""
FP8_WEIGHT_GRADIENT = "trainfit::add_fp8_weight_gradient_"
"""The product of the first argument and the transposed third, added to the last."""
CONVOLUTIONS = {"convolution": (0, 1, 6), "convolution_backward": (1, 2, 7)}
"""Name of an operation of aten -> positions of input, weight and whether it is transposed; the number of
groups comes two after that."""
RECURRENT = {"aten::_cudnn_rnn": 6, "aten::_cudnn_rnn_backward": 10}
"""Name of an operation -> position of cuDNN's mode."""
GROUP_NORMS = {"native_group_norm": 0, "native_group_norm_backward": 1}
"""Name of an operation of aten -> position of the input."""
TF32_CAPABILITY = (8, 0)
REDUCTIONS = frozenset(
    {"sum", "mean", "amax", "linalg_vector_norm", "_softmax", "_log_softmax", "norm", "var"}
)


def product_shape(func: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
    """Return batch, m, n, k of a matrix product, or of a convolution as one; empty for other operations.

    A recurrent layer is one product for each position, layer and direction.

    A convolution is a product for each of its groups, of [points of all images, channels x filter elements]
    and a group's filters: ``Conv2d(64, 128, 3)`` on [8, 64, 30, 30] is (1, 8 x 28 x 28, 128, 64 x 9).
    """
    convolved = _convolved(func, args)
    if convolved is not None:
        return convolved
    if func._schema.name in RECURRENT:
        return recurrent.product_shape(args, RECURRENT[func._schema.name])
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
    at = _convolution_at(func)
    if at is not None:
        if _has_channels_last(args[at[0]]):
            return CHANNELS_LAST
        return POINTWISE if prod(args[at[1]].shape[2:]) == 1 else ""
    name = func._schema.name.partition("::")[2]
    if name in GROUP_NORMS and _has_channels_last(args[GROUP_NORMS[name]]):
        return CHANNELS_LAST
    factors = _factors(func, args)
    if factors is not None:
        return "".join("t" if each.stride(-1) != 1 and each.stride(-2) == 1 else "n" for each in factors)
    inputs = tensors_of(args)
    if not inputs or not isinstance(out, Tensor):
        return ""
    orders = {id(each): _order(each) for each in (*inputs, out)}
    if None in orders.values():
        return "strided"
    if name in REDUCTIONS:
        return "outer" if out.ndim and inputs[0].ndim and out.shape[-1:] == inputs[0].shape[-1:] else ""
    # A scalar tensor is no operand of size.
    sized = [each for each in (*inputs, out) if each.ndim]
    if len({each.dtype for each in sized if each.is_floating_point()}) > 1:
        return "mixed"
    if any(orders[id(each)] != orders[id(out)] for each in sized if each.shape == out.shape):
        return "strided"
    return "broadcast" if any(each.shape != out.shape or 0 in each.stride() for each in sized) else ""


def product_dtype(func: Any, dtype: str, capability: tuple[int, int] | None) -> str:
    """Return ``tf32`` where products or convolutions of fp32 tensors run so; else ``dtype``.

    As PyTorch is set; its default is tf32 for convolutions and fp32 for products.
    """
    if dtype != "float32" or capability is None or capability < TF32_CAPABILITY:
        return dtype
    if _convolution_at(func) is not None:
        precision = torch.backends.cudnn.conv.fp32_precision  # pyright: ignore[reportAttributeAccessIssue]
        return "tf32" if precision == "tf32" else dtype
    namespace, _, name = func._schema.name.partition("::")
    if namespace != "aten" or name not in PRODUCTS:
        return dtype
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else dtype


def _convolution_at(func: Any) -> tuple[int, int, int] | None:
    namespace, _, name = func._schema.name.partition("::")
    return CONVOLUTIONS.get(name) if namespace == "aten" else None


def _convolved(func: Any, args: tuple[Any, ...]) -> tuple[int, ...] | None:
    at = _convolution_at(func)
    if at is None:
        return None
    x, weight, transposed, groups = args[at[0]], args[at[1]], args[at[2]], args[at[2] + 2]
    if transposed:
        points = x.shape[2:]
    elif at[0]:
        points = args[0].shape[2:]  # The output's gradient.
    else:
        points = [
            (length + 2 * pad - dilation * (size - 1) - 1) // stride + 1
            for length, size, stride, pad, dilation in zip(
                x.shape[2:], weight.shape[2:], *args[3:6], strict=True
            )
        ]
    return groups, x.shape[0] * prod(points), weight.shape[0] // groups, prod(weight.shape[1:])


def _has_channels_last(x: Tensor) -> bool:
    if x.ndim not in (4, 5) or x.is_contiguous():
        return False
    return x.is_contiguous(memory_format=torch.channels_last if x.ndim == 4 else torch.channels_last_3d)


def _factors(func: Any, args: tuple[Any, ...]) -> tuple[Tensor, Tensor] | None:
    namespace, _, name = func._schema.name.partition("::")
    if func._schema.name == WEIGHT_GRADIENT:
        return args[1].t(), args[2]
    if func._schema.name == FP8_WEIGHT_GRADIENT:
        return args[0], args[2].t()
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
