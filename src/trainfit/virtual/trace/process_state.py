"""Process-wide settings, random states and garbage collection, restored after a trace."""

import gc
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
import torch

AUTOCAST_DEVICES = ("cpu", "cuda")
FP32_PRECISIONS = (
    ("generic", "all"),
    *((backend, op) for backend in ("cuda", "mkldnn") for op in ("all", "matmul", "conv", "rnn")),
)
"""Backends and operations that have a setting of ``fp32_precision``."""
_gc_frozen: ContextVar[bool] = ContextVar("gc_frozen", default=False)
"""True inside ``frozen_gc``; ``gc.get_freeze_count`` walks every object."""


@contextmanager
def frozen_gc() -> Iterator[None]:
    """Exclude objects that exist now from garbage collection.

    A full collection of torch's and transformers' objects takes a quarter of a second on a CPU. Cycles that
    the traced code makes are collected as usual. No effect when nested or after the caller's ``gc.freeze()``.
    """
    if _gc_frozen.get() or gc.get_freeze_count():
        yield
        return
    gc.freeze()
    token = _gc_frozen.set(True)
    try:
        yield
    finally:
        _gc_frozen.reset(token)
        gc.unfreeze()


@contextmanager
def restored_settings() -> Iterator[None]:
    """Restore default dtype and device, this thread's modes and the recursion limit on exit."""
    with ExitStack() as stack:
        _unless_equal(stack, sys.getrecursionlimit, sys.setrecursionlimit)  # Inductor raises it.
        _restore_defaults(stack)
        _restore_modes(stack)
        yield


@contextmanager
def restored_switches() -> Iterator[None]:
    """Restore the process-wide switches that training scripts set, and the warning filters, on exit."""
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        _restore_switches(stack)
        yield


@contextmanager
def restored_random() -> Iterator[None]:
    """Restore the states of Python's ``random`` and of NumPy's global generator on exit."""
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        yield


def _restore_defaults(stack: ExitStack) -> None:
    _unless_equal(stack, torch.get_default_dtype, torch.set_default_dtype)
    context = _device_context()

    def restore() -> None:
        if _device_context() is not context:
            torch.set_default_device(None if context is None else context.device)

    stack.callback(restore)


def _restore_modes(stack: ExitStack) -> None:
    _unless_equal(stack, torch.is_grad_enabled, torch._C._set_grad_enabled)
    for kind in AUTOCAST_DEVICES:
        for read, write in (
            (torch.is_autocast_enabled, torch.set_autocast_enabled),
            (torch.get_autocast_dtype, torch.set_autocast_dtype),
        ):
            _unless_equal(stack, partial(read, kind), partial(write, kind))
    _unless_equal(stack, torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled)
    _unless_equal(
        stack,
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.autograd.set_detect_anomaly(*value),
    )


def _restore_switches(stack: ExitStack) -> None:
    backends, deterministic = torch.backends, torch.utils.deterministic
    _unless_equal(
        stack,
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    )
    _attributes(stack, deterministic, "fill_uninitialized_memory")
    _restore_fp32_precision(stack)
    reductions = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
    _attributes(stack, backends.cuda.matmul, *reductions)
    _attributes(stack, backends.cudnn, "enabled", "benchmark", "deterministic")
    for name in ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp"):
        enable = getattr(backends.cuda, f"enable_{name}")
        _unless_equal(stack, getattr(backends.cuda, f"{name}_enabled"), enable)
    _unless_equal(stack, torch.get_num_threads, torch.set_num_threads)


def _restore_fp32_precision(stack: ExitStack) -> None:
    """Restore the legacy setting first, because writing it sets those by backend and operation."""
    for backend, op in FP32_PRECISIONS:
        read = partial(torch._C._get_fp32_precision_getter, backend, op)
        _unless_equal(stack, read, partial(torch._C._set_fp32_precision_setter, backend, op))
    _unless_equal(stack, _legacy_precision, lambda value: value and torch.set_float32_matmul_precision(value))


def _legacy_precision() -> str | None:
    """Return ``torch.get_float32_matmul_precision()``; None where settings by backend differ."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _attributes(stack: ExitStack, owner: Any, *names: str) -> None:
    for name in names:
        _unless_equal(stack, partial(getattr, owner, name), partial(setattr, owner, name))


def _unless_equal(stack: ExitStack, read: Callable[[], Any], write: Callable[[Any], Any]) -> None:
    """Write back what ``read`` returns now, unless it returns the same on exit."""
    before = read()

    def restore() -> None:
        if read() != before:
            write(before)

    stack.callback(restore)


def _device_context() -> Any:
    """Return the function mode that ``torch.set_default_device`` entered, if it was called."""
    return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
