"""How an operation runs on fake tensors: what it gives, and where that is not what PyTorch's fake kernel gives.

A value that only a run can know is taken to be zero; what a GPU would refuse (a row that a table lacks) is refused.
"""

from collections.abc import Iterator
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
from trainfit.virtual.trace.exclusive import replaced
from trainfit.virtual.trace.host_tensors import known_highest, known_value

aten = torch.ops.aten
CPU, META = torch.device("cpu"), torch.device("meta")
FILLS = frozenset({aten.normal_.default, aten.uniform_.default, aten.fill_.Scalar, aten.zero_.default})
"""They write values, which a fake tensor has none of. FakeTensorMode takes a millisecond for each random one."""
PLAIN = frozenset(
    {
        aten.mm.default,
        aten.mul.Tensor,
        aten.add.Tensor,
        aten.sub.Tensor,
        aten.neg.default,
        aten.pow.Tensor_Scalar,
        aten.sum.dim_IntList,
        aten.detach.default,
        aten.t.default,
        aten.view.default,
        aten._unsafe_view.default,
        aten.transpose.int,
        aten.slice.Tensor,
        aten.unsqueeze.default,
        aten.expand.default,
        aten.as_strided.default,
    }
)
FACTORIES = frozenset({aten.empty.memory_format, aten.ones.default, aten.zeros.default})
"""With PLAIN most of what a step and a model's construction call. FakeTensorMode asks their meta kernels, and so is asked less."""
PROFILING = frozenset(
    {
        torch.ops.profiler._record_function_enter_new.default,
        torch.ops.profiler._record_function_exit._RecordFunction,
    }
)
"""Every step of an optimizer says so to the profiler."""
LARGEST_FALLBACK_BYTES = 64 << 20
"""Inputs of an operation that may run for real."""
READS_VALUE = {aten._local_scalar_dense.default, aten.item.default}


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """The operation's result, fake.

    Raises:
        InputError: an embedding is asked for a row that it has not.
    """
    if func in FILLS and type(args[0]) is FakeTensor and args[0].constant is None:
        return args[0]
    if func in PROFILING:
        with torch._C._DisableTorchDispatch():  # pyright: ignore[reportAttributeAccessIssue]
            return func(*args, **kwargs)
    short = _by_meta_kernel(func, args, kwargs)
    if short is not None:
        return short
    if func is aten.embedding.default:
        _check_rows(args[0], args[1])
    if func is aten._grouped_mm.default:
        return _grouped_mm(args, kwargs)
    if func is aten._scaled_mm.out:
        return kwargs["out"]  # Compiled code's; the fake kernel is for the functional one alone.
    if _only_writes_lists(func):
        # It changes no shape. FakeTensorMode has no kernel for some (_fused_sgd_) and would run them for real, on zeros
        # of the whole model's size.
        return None
    return func(*args, **kwargs)


def _by_meta_kernel(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """The result as FakeTensorMode makes it, without its cache, whose keys take longer than the kernel.

    None where there is more to it: symbolic sizes, a constant, two devices.
    """
    if func in PLAIN:
        given: list[Any] = [value for value in args if isinstance(value, Tensor)]
        if any(type(t) is not FakeTensor or t.constant is not None for t in given):
            return None
        mode, device = given[0].fake_mode, given[0].fake_device
        if any(t.fake_mode is not mode or t.fake_device != device for t in given):
            return None
    elif func in FACTORIES and kwargs.get("device") == CPU and not kwargs.get("pin_memory"):
        mode, device = active_fake_mode(), CPU
        kwargs = kwargs | {"device": META}
    else:
        return None
    if mode is None or mode.shape_env is not None or mode.in_kernel_invocation:
        return None
    with in_kernel_invocation_manager(mode):
        made = func(*args, **kwargs)
    return FakeTensor(mode, made, device)


@cache
def _only_writes_lists(func: Any) -> bool:
    return func._schema.name.startswith(("aten::_fused_", "aten::_foreach_")) and not func._schema.returns


def _grouped_mm(args: Any, kwargs: Any) -> Tensor:
    """CUDA multiplies groups of any floating dtype; the fake kernel takes bf16 only (_meta_registrations.py)."""
    dtype = args[0].dtype
    cast = tree_map_only(Tensor, lambda t: t.to(torch.bfloat16) if t.is_floating_point() else t, args)
    out = aten._grouped_mm.default(*cast, **kwargs)
    return (
        out
        if out.dtype == dtype
        else torch.empty_strided(out.shape, out.stride(), dtype=dtype, device=out.device)
    )


def _check_rows(table: Tensor, indices: Tensor) -> None:
    """A GPU run would end in a device assert: more positions or tokens than the table has rows."""
    highest = known_highest(indices)
    if highest is not None and highest >= table.shape[0]:
        raise InputError(
            f"row {highest} of an embedding with {table.shape[0]} rows is asked for: the model has no such position or token",
            "use a shorter sequence, or a model with more positions",
            field="batch.seq",
        )


def read(t: Tensor) -> Any:
    """A tensor's value where it can be known; else zero: no gradient is infinite (GradScaler), no norm is large."""
    known = known_value(t)
    if known is not None:
        return known
    return False if t.dtype == torch.bool else 0.0 if t.is_floating_point() else 0


@contextmanager
def report_fallbacks(notes: set[str]) -> Iterator[None]:
    """Report operations without a fake kernel, which PyTorch runs for real on zeros.

    Args:
        notes: gets a sentence for each such operation.
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
