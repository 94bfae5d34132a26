"""Bytes that a kernel reads and writes in device memory: inputs once, outputs once, nothing for views.

This is the minimum traffic: repeated reads are assumed to hit caches. Indexing counts the selected elements,
a broadcast input its stored elements, an in-place operation its target twice.
"""

from functools import lru_cache
from typing import Any

from torch import Tensor

from trainfit.virtual.cuda.op_kinds import (
    BY_ONE,
    FACTORIES,
    FREE,
    GATHERS,
    HOST_COPIES,
    LIKE,
    MAY_COPY,
    MOVED_ONCE,
    UNWRITTEN,
    base_name,
    is_elsewhere,
)
from trainfit.virtual.trace.tensors import tensors_of

WHOLE = frozenset({"max", "min"})  # Their overload default reads a contiguous copy (ReduceAllOps.cpp)
GRADIENTS = 1
"""Position of a fused optimizer's gradients, which are written only with a loss scale, although its schema
always marks them as written."""

KINDS = {
    "write": FACTORIES, "like": LIKE, "gather": GATHERS, "host copy": HOST_COPIES, "copy": {"copy"},
}  # fmt: skip


def bytes_moved(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Return the bytes read and written by one call on fake tensors."""
    kind, written = _kind(func)
    if kind == "free":
        return 0
    if kind == "write":
        return _sum(out)
    if kind == "host copy":
        return _stored(args[1])
    if kind == "copy":
        return _stored(args[0]) + _stored(args[1])
    if kind == "like":
        return _sum(args[1:]) + _sum(out)
    if kind == "gather":
        return _indexed(args, out)
    if kind == "may copy":
        is_view = out.untyped_storage()._cdata == args[0].untyped_storage()._cdata
        return 0 if is_view else _stored(args[0]) + _stored(out)
    if kind == "convolution backward":
        # Each gradient is a kernel that reads the output's gradient.
        return _sum(args) + _sum(out) + _stored(args[0]) * max(0, sum(map(bool, args[10])) - 1)
    if kind == "whole":
        return _stored(args[0]) * (1 if args[0].is_contiguous() else 3) + _stored(out)
    moved = _sum(args) + _sum(kwargs) if kwargs else _sum(args)
    if not written:
        return moved + _sum(out)
    # In-place targets are read and written; the result is the same memory.
    moved += sum(_sum(args[i]) for i in written if i < len(args))
    if func.namespace == "trainfit":  # Its operators return other memory alone.
        moved += _sum(out)
    return moved if kwargs.get("grad_scale") is None else moved + _sum(args[GRADIENTS])


@lru_cache(maxsize=4096)
def _kind(func: Any) -> tuple[str, tuple[int, ...]]:
    """Return how an operation accesses memory, and the positions of the arguments that it writes."""
    name = base_name(func)
    if name in MAY_COPY:
        return "may copy", ()
    if name == "convolution_backward":
        return "convolution backward", ()
    if name in WHOLE and func._overloadname == "default":
        return "whole", ()
    moves_nothing = is_elsewhere(func) and func.namespace != "fsdp"
    if func.is_view or name in FREE | BY_ONE | UNWRITTEN or moves_nothing:
        return "free", ()
    for kind, names in KINDS.items():
        if name in names:
            return kind, ()
    arguments = func._schema.arguments
    written = (i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)
    once = (GRADIENTS,) if name.startswith("_fused_") else MOVED_ONCE.get(name, ())
    return "each", tuple(i for i in written if i not in once)


def _indexed(args: tuple[Any, ...], out: Any) -> int:
    """Count indices, selected elements and output; of a scatter into a new tensor all elements."""
    tensors = tensors_of(args)
    target, others = tensors[0], tensors[1:]
    if out is None or (isinstance(out, Tensor) and out is target):
        # Indices and values are read, the selected elements of the target are read and written.
        values = max((_stored(t) for t in others if t.dtype == target.dtype), default=0)
        return sum(map(_stored, others)) + 2 * values
    if others and isinstance(out, Tensor) and out.shape == target.shape and len(others) > 1:
        return sum(map(_stored, tensors)) + _stored(out)
    return sum(map(_stored, others)) + 2 * _sum(out)


def _sum(value: Any) -> int:
    return sum(map(_stored, tensors_of(value)))


def _stored(t: Tensor) -> int:
    """Return the bytes of the stored elements: a dimension of stride 0 is stored once."""
    size = t.element_size()
    for length, stride in zip(t.shape, t.stride(), strict=True):
        if stride:
            size *= length
    return size if t.numel() else 0
