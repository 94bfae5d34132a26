"""Run operations on fake tensors, with corrections of PyTorch's fake kernels.

Unknown values are zero. Errors of a GPU, such as an embedding index out of range, are raised.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.utils._pytree import tree_map_only

from trainfit.spec.errors import InputError
from trainfit.spec.units import format_bytes
from trainfit.virtual.cuda import recurrent
from trainfit.virtual.trace.exclusive import replaced
from trainfit.virtual.trace.host_tensors import known_highest, on_host, seen_values

aten = torch.ops.aten
CPU, META, STRIDED = torch.device("cpu"), torch.device("meta"), torch.strided
FILLS = frozenset({aten.normal_.default, aten.uniform_.default, aten.fill_.Scalar, aten.zero_.default})
"""Operations without effect on fake tensors; FakeTensorMode takes a millisecond for each random one."""
PLAIN = frozenset({
    aten.mm.default, aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.neg.default,
    aten.pow.Tensor_Scalar, aten.sum.dim_IntList, aten.detach.default, aten.t.default,
    aten.view.default, aten._unsafe_view.default, aten.transpose.int, aten.slice.Tensor,
    aten.unsqueeze.default, aten.expand.default, aten.as_strided.default,
})  # fmt: skip
FACTORIES = frozenset({
    aten.empty.memory_format, aten.empty_strided.default, aten.ones.default, aten.zeros.default,
})  # fmt: skip
"""With PLAIN: the most frequent operations, whose meta kernels are called without FakeTensorMode."""
POINTWISE = frozenset({
    aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar,
    aten.neg.default, aten.pow.Tensor_Scalar, aten.rsqrt.default, aten.sqrt.default, aten.reciprocal.default,
    aten.exp.default, aten.sigmoid.default, aten.silu.default, aten.silu_backward.default,
})  # fmt: skip
IN_PLACE = frozenset({
    aten.add_.Tensor, aten.sub_.Tensor, aten.mul_.Tensor, aten.mul_.Scalar, aten.div_.Tensor,
    aten.div_.Scalar, aten.addcmul_.default, aten.addcdiv_.default, aten.lerp_.Scalar, aten.sqrt_.default,
})  # fmt: skip
COPIES = frozenset({
    aten.clone.default, aten._to_copy.default, aten.zeros_like.default, aten.empty_like.default,
    aten.ones_like.default,
})  # fmt: skip
KNOWN = POINTWISE | IN_PLACE | COPIES
"""Operations whose result is known without a kernel for plain layouts and dtypes."""
SHORT = KNOWN | PLAIN | FACTORIES
PROFILING = frozenset({
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
})  # fmt: skip
"""Profiler ranges of ``Optimizer.step``."""
STATES = "_trainfit_states"
"""Attribute of a FakeTensorMode: device -> the attributes of its tensors."""
LARGEST_FALLBACK_BYTES = 64 << 20  # Inputs of an operation that may run for real
MAKE_SUBCLASS = Tensor._make_subclass
"""PyTorch's own function, which is replaced in user code (user/gpu.py)."""
COALESCED = "c10d::allreduce_coalesced_"
READS_VALUE = {aten._local_scalar_dense.default, aten.item.default}


PRODUCTS_OF_DTYPE = {
    overload: name.endswith("out")
    for packet in (aten.mm, aten.bmm, aten.addmm, aten.baddbmm)
    for name in ("dtype", "dtype_out")
    if (overload := getattr(packet, name, None)) is not None
}
"""Products whose result has a wider dtype than the factors -> whether they write into ``out``. PyTorch has no
fake kernel for them, or one that takes ``out_dtype`` for ``beta`` (torch 2.11)."""


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the operation's fake result; an embedding index out of range is an InputError."""
    if func in FILLS and type(args[0]) is FakeTensor and args[0].constant is None:
        return args[0]
    if func in PROFILING:
        with torch._C._DisableTorchDispatch():  # pyright: ignore[reportAttributeAccessIssue]
            return func(*args, **kwargs)
    ours = getattr(func, "fake", None)
    if ours is not None and not kwargs and (place := _place_of(args)) is not None:
        return _by_our_kernel(ours, args, *place)
    short = _by_meta_kernel(func, args, kwargs)
    if short is not None:
        return short
    if func is aten.embedding.default:
        _check_rows(args[0], args[1])
    if func is aten._grouped_mm.default:
        return _grouped_mm(args, kwargs)
    if func.namespace == "c10d" and func._schema.name == COALESCED:
        tensors, group, op, *rest = args
        return torch.ops.c10d.allreduce_(tensors, group, op, None, *rest)[1]  # It has a fake kernel.
    if func in SYNC_BATCH_NORM:
        return SYNC_BATCH_NORM[func](*args)
    if func in recurrent.FAKES:
        return recurrent.FAKES[func](*args)
    if func in PRODUCTS_OF_DTYPE:
        return kwargs["out"] if PRODUCTS_OF_DTYPE[func] else _product_of_dtype(*args)
    if func is aten._scaled_mm.out:
        return kwargs["out"]  # From compiled code; only the functional overload has a fake kernel.
    if _only_writes_lists(func):
        # Some (_fused_sgd_) have no fake kernel and would run for real on zeros of the model's size.
        return None
    return func(*args, **kwargs)


def _product_of_dtype(*args: Any) -> Tensor:
    """Return the product of the last two factors in the dtype that the last argument names."""
    *_, a, b, dtype = args
    return a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=dtype)


def _by_meta_kernel(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """Return the meta kernel's result, faster than FakeTensorMode; None where that must decide."""
    if func not in SHORT:
        return None
    is_known = func in KNOWN
    tensors: list[Any] = []
    if is_known or func in PLAIN:
        place = _place_of(args)
        if place is None:
            return None
        tensors, mode, device = place
    elif func in FACTORIES and kwargs.get("device") == CPU and not kwargs.get("pin_memory"):
        mode, device = active_fake_mode(), CPU
        kwargs = kwargs | {"device": META}
    else:
        return None
    if mode is None or not _is_plain(mode):
        return None
    if is_known:
        if func in IN_PLACE:
            return args[0] if _is_first_changed(args, tensors) else None
        known = _copied(tensors[0], kwargs) if func in COPIES else _pointwise(args, tensors)
        if known is not None:
            dtype = kwargs.get("dtype") or tensors[0].dtype
            with torch._C._DisableTorchDispatch():  # pyright: ignore[reportAttributeAccessIssue]
                meta = torch.empty_strided(*known, dtype=dtype, device=META)
            return _fake(mode, meta, device)
        if func not in PLAIN:
            return None
    with in_kernel_invocation_manager(mode):
        meta = func(*args, **kwargs)
    return _fake(mode, meta, device)


def _by_our_kernel(
    kernel: Callable[..., Any], args: Any, tensors: list[Any], mode: Any, device: torch.device
) -> Any:
    """Return the result of the fake kernel of a trainfit operator, faster than FakeTensorMode."""
    with in_kernel_invocation_manager(mode):
        found = kernel(*args)
    if isinstance(found, tuple):
        return tuple(_fake(mode, meta, device) for meta in found)
    return None if found is None else _fake(mode, found, device)


def _place_of(args: Any) -> tuple[list[Any], Any, torch.device] | None:
    """Return the tensors among arguments, and their mode and device; None: they are not plain, or differ."""
    tensors: list[Any] = [value for value in args if isinstance(value, Tensor)]
    if any(type(t) is not FakeTensor or t.constant is not None or t.layout != STRIDED for t in tensors):
        return None
    mode, device = tensors[0].fake_mode, tensors[0].fake_device
    if any(t.fake_mode is not mode or t.fake_device != device for t in tensors) or not _is_plain(mode):
        return None
    return tensors, mode, device


def _is_plain(mode: Any) -> bool:
    return mode.shape_env is None and not mode.in_kernel_invocation


def _fake(mode: Any, meta: Tensor, device: torch.device) -> FakeTensor:
    """Return ``FakeTensor(mode, meta, device)``, with the attributes of an earlier one."""
    states = mode.__dict__.setdefault(STATES, {})
    if device not in states:
        states[device] = dict(vars(FakeTensor(mode, meta, device)))
    made: Any = MAKE_SUBCLASS(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device)
    torch._C._set_throw_on_mutable_data_ptr(made)  # pyright: ignore[reportAttributeAccessIssue]
    made.__dict__.update(states[device])
    return made


Layout = tuple[Sequence[int], Sequence[int]]
"""Shape and strides."""


def _is_first_changed(args: Any, tensors: list[Any]) -> bool:
    """Return whether the arguments of an operation in place are certainly valid for it."""
    first = args[0]
    dtype, shape = first.dtype, first.shape
    if not dtype.is_floating_point or complex in map(type, args):
        return False
    if any(t.dtype != dtype or t.shape not in (shape, ()) for t in tensors):
        return False
    return dense_strides(shape, first.stride()) is not None


def _copied(t: Tensor, kwargs: Any) -> Layout | None:
    """Return the layout of a tensor's copy; None: not known."""
    kept = kwargs.get("memory_format") or torch.preserve_format
    moves = kwargs.get("device") not in (None, t.device) or kwargs.get("pin_memory")
    if moves or kwargs.get("layout") not in (None, STRIDED):
        return None
    if kept == torch.contiguous_format:
        return t.shape, contiguous_strides(t.shape)
    is_dense = dense_strides(t.shape, t.stride()) == t.stride()
    return (t.shape, t.stride()) if kept == torch.preserve_format and is_dense else None


def _pointwise(args: Any, tensors: list[Any]) -> Layout | None:
    """Return the layout of a pointwise operation's result, as TensorIterator decides it; None: not known.

    Its dimensions are in memory as those of the first argument, if that is as large as the result.
    """
    first, *others = tensors
    dtype, shape = first.dtype, first.shape
    if not dtype.is_floating_point or complex in map(type, args) or any(t.dtype != dtype for t in others):
        return None
    if any(t.shape != shape for t in others):
        shape = torch.broadcast_shapes(shape, *(t.shape for t in others))
    if first.shape == shape:
        strides = dense_strides(shape, first.stride())
        return None if strides is None else (shape, strides)
    return (shape, contiguous_strides(shape)) if all(t.is_contiguous() for t in tensors) else None


def dense_strides(shape: Sequence[int], like: Sequence[int]) -> tuple[int, ...] | None:
    """Return strides without gaps, dimensions in the order of other strides; None: these are ambiguous."""
    several = [stride for stride, size in zip(like, shape, strict=True) if size > 1]
    if 0 in several or len(set(several)) < len(several):
        return None
    return _strides(shape, sorted(range(len(shape) - 1, -1, -1), key=like.__getitem__))


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return _strides(shape, range(len(shape) - 1, -1, -1))


def _strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    strides, step = [1] * len(shape), 1
    for dim in order:
        strides[dim] = step
        step *= max(1, shape[dim])
    return tuple(strides)


@cache
def _only_writes_lists(func: Any) -> bool:
    return func._schema.name.startswith(("aten::_fused_", "aten::_foreach_")) and not func._schema.returns


def _grouped_mm(args: Any, kwargs: Any) -> Tensor:
    """Run the fake kernel, which takes bf16 only (_meta_registrations.py), for any floating dtype."""
    dtype = args[0].dtype
    cast = tree_map_only(Tensor, lambda t: t.to(torch.bfloat16) if t.is_floating_point() else t, args)
    out = aten._grouped_mm.default(*cast, **kwargs)
    if out.dtype == dtype:
        return out
    return torch.empty_strided(out.shape, out.stride(), dtype=dtype, device=out.device)


def _of_channels(x: Tensor, count: int) -> tuple[Tensor, ...]:
    """Return ``count`` statistics of the channels of ``x`` [b, c, ...], [c] each."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return tuple(torch.empty(x.shape[1], dtype=dtype, device=x.device) for _ in range(count))


def _reduced(
    gradient: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, *_: bool
) -> Any:
    like = mean if weight is None else weight
    return (*_of_channels(x, 2), torch.empty_like(like), torch.empty_like(like))


SYNC_BATCH_NORM: dict[Any, Callable[..., Any]] = {
    aten.batch_norm_stats.default: lambda x, *_: _of_channels(x, 2),
    aten.batch_norm_gather_stats_with_counts.default: lambda x, *_: _of_channels(x, 2),
    aten.batch_norm_elemt.default: lambda x, *_: torch.empty_like(x),
    aten.batch_norm_backward_reduce.default: _reduced,
    aten.batch_norm_backward_elemt.default: lambda gradient, x, *_: torch.empty_like(x),
}
"""Operations of torch.nn.SyncBatchNorm, which have no fake kernels."""


def _check_rows(table: Tensor, indices: Tensor) -> None:
    """Refuse an index out of range, which ends in a device-side assert on a GPU."""
    highest = known_highest(indices)
    if highest is not None and highest >= table.shape[0]:
        raise InputError(
            f"index {highest} is out of range of an embedding with {table.shape[0]} rows: "
            "the model has no such position or token",
            "use a shorter sequence, or a model with more positions",
            field="batch.seq",
        )


def read(t: Tensor) -> Any:
    """Return a tensor's value if known or assumed, else zero: gradients are finite, norms small."""
    seen = seen_values(t)
    if seen is not None:
        return on_host(seen.item, (), {})
    return False if t.dtype == torch.bool else 0.0 if t.is_floating_point() else 0


def are_equal(a: Tensor, b: Tensor) -> bool:
    """Return ``torch.equal``; unknown values differ from all others."""
    if a is b:
        return True
    one, other = seen_values(a), seen_values(b)
    return one is not None and other is not None and on_host(torch.equal, (one, other), {})


@contextmanager
def report_fallbacks(notes: set[str]) -> Iterator[None]:
    """Add a note for each operation without a fake kernel, which PyTorch runs for real on zeros.

    Raises:
        InputError: inside, where the inputs exceed ``LARGEST_FALLBACK_BYTES``.
    """
    original = fake_tensor.run_fallback_kernel

    def run_fallback(mode: Any, func: Any, flat_args: Any, *rest: Any) -> Any:
        size = sum(t.numel() * t.element_size() for t in flat_args if isinstance(t, FakeTensor))
        if size > LARGEST_FALLBACK_BYTES:
            raise InputError(
                f"{func} on {format_bytes(size)}: PyTorch {torch.__version__} has no fake kernel for it",
                "leave it out, or replace it with operations that have a fake kernel",
                field="step",
                value=str(func),
            )
        notes.add(f"{func}: PyTorch has no fake kernel for it; it was run on zeros")
        return original(mode, func, flat_args, *rest)

    with replaced(fake_tensor, "run_fallback_kernel", run_fallback):
        yield
