"""Process-wide settings, random states and garbage collection, restored after a trace."""

import gc
import os
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
_freezes_for_good = False
MOST_FROZEN_BY_PYTHON = 1000
"""Python 3.12 freezes a few hundred objects as it starts; ``gc.freeze()`` freezes at least thousands."""


def freeze_for_good() -> None:
    """Never collect objects that exist now or at the beginning of a trace, in a process that only traces.

    Reference cycles left by imports are not collected first, which would take 0.4 s.
    """
    global _freezes_for_good
    _freezes_for_good = True
    gc.freeze()


@contextmanager
def frozen_gc() -> Iterator[None]:
    """Exclude objects that exist now from garbage collection; no effect when nested or after ``gc.freeze()``.

    A full collection of torch's and transformers' objects takes a quarter of a second on a CPU.
    """
    if _gc_frozen.get() or (not _freezes_for_good and gc.get_freeze_count() > MOST_FROZEN_BY_PYTHON):
        yield
        return
    if _freezes_for_good:
        gc.collect()  # Garbage of the previous trace; most of its objects are frozen.
    gc.freeze()
    token = _gc_frozen.set(True)
    try:
        yield
    finally:
        _gc_frozen.reset(token)
        if not _freezes_for_good:
            gc.unfreeze()


@contextmanager
def restored_environment() -> Iterator[None]:
    """Restore the environment's variables, which a user's code sets (Hugging Face's TrainingArguments)."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def paused_gc() -> Iterator[None]:
    """Pause garbage collection, which would walk the compiler's growing graphs again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def no_function_modes() -> Iterator[None]:
    """Leave all TorchFunctionModes, which Dynamo would trace into a graph."""
    modes = [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)


def freeze_more() -> None:
    """Exclude objects made since from garbage collection too, within ``frozen_gc``."""
    if _gc_frozen.get():
        gc.freeze()


Setting = tuple[Callable[[], Any], Callable[[Any], Any]]
"""Functions that read and write a process-wide setting."""


@contextmanager
def restored_settings() -> Iterator[None]:
    """Restore default dtype and device, this thread's modes and the recursion limit on exit."""
    settings: list[Setting] = [
        (sys.getrecursionlimit, sys.setrecursionlimit),  # Inductor raises it.
        (torch.get_default_dtype, torch.set_default_dtype),
        (_device_context, lambda context: torch.set_default_device(context and context.device)),
        (torch.is_grad_enabled, torch._C._set_grad_enabled),
        (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        (
            lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            lambda value: torch.autograd.set_detect_anomaly(*value),
        ),
    ]
    for kind in AUTOCAST_DEVICES:
        settings += [
            (partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind)),
            (partial(torch.get_autocast_dtype, kind), partial(torch.set_autocast_dtype, kind)),
        ]
    with _restored(settings):
        yield


@contextmanager
def restored_switches() -> Iterator[None]:
    """Restore the process-wide switches that training scripts set, and the warning filters, on exit."""
    backends = torch.backends
    names = {
        torch.utils.deterministic: ("fill_uninitialized_memory",),
        backends.cuda.matmul: (
            "allow_fp16_reduced_precision_reduction",
            "allow_bf16_reduced_precision_reduction",
        ),
        backends.cudnn: ("enabled", "benchmark", "deterministic"),
    }
    settings: list[Setting] = [
        (
            lambda: (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
        ),
        (torch.get_num_threads, torch.set_num_threads),
        *(
            (partial(getattr, owner, name), partial(setattr, owner, name))
            for owner, attributes in names.items()
            for name in attributes
        ),
        *(
            (getattr(backends.cuda, f"{name}_enabled"), getattr(backends.cuda, f"enable_{name}"))
            for name in ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")
        ),
        *(
            (
                partial(torch._C._get_fp32_precision_getter, *backend_and_op),
                partial(torch._C._set_fp32_precision_setter, *backend_and_op),
            )
            for backend_and_op in FP32_PRECISIONS
        ),
        # Restored first: writing it also sets those by backend and operation.
        (_legacy_precision, lambda value: value and torch.set_float32_matmul_precision(value)),
    ]
    with warnings.catch_warnings(), _restored(settings):
        yield


@contextmanager
def restored_random() -> Iterator[None]:
    """Restore the states of Python's ``random`` and of NumPy's global generator on exit."""
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        yield


@contextmanager
def _restored(settings: list[Setting]) -> Iterator[None]:
    """Write changed settings back on exit, the last one first; an error in one does not keep the others."""

    def restore(setting: Setting, value: Any) -> None:
        read, write = setting
        if read() != value:
            write(value)

    with ExitStack() as stack:
        for setting in settings:
            stack.callback(restore, setting, setting[0]())
        yield


def _legacy_precision() -> str | None:
    """Return ``torch.get_float32_matmul_precision()``; None where settings by backend differ."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _device_context() -> Any:
    """Return the function mode that ``torch.set_default_device`` entered, if it was called."""
    return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
