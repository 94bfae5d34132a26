"""In-place gradient accumulation of the autograd engine, which fake tensors would do out of place.

The gradients of a tensor used twice are added in place if only the engine refers to the first one, but never
under a dispatch mode (torch/csrc/autograd/input_buffer.cpp: ``can_accumulate_inplace``, ``accumulate``). A
gradient that only a Python hook stores is assumed unreferenced.
"""

import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from trainfit.virtual.trace.cpu_fakes import CpuFakeMode

aten = torch.ops.aten
ENGINE = "_engine_run_backward"
"""The Python function that calls the engine; operations of the engine and of C++ nodes come from its
frame."""
DISPATCHING = ("trainfit/virtual/", "trainfit/user/", "torch/_compile.py", "torch/_dynamo/eval_frame.py")
"""Files whose frames are between an operation and the dispatch mode."""


def accumulate_in_place(func: Any, args: Any, kwargs: Any) -> Any:
    """Return ``aten.add_`` for an ``aten.add`` that the engine runs in place on a GPU, else ``func``."""
    if func is not aten.add.Tensor or torch.is_grad_enabled() or kwargs or len(args) != 2:
        return func
    first, second = args
    if not isinstance(second, Tensor) or first.shape != second.shape or first.dtype != second.dtype:
        return func
    if not is_non_overlapping_and_dense_or_false(first) or _counts(first) != sole_reference_counts():
        return func
    return aten.add_.Tensor if _dispatcher() == ENGINE else func


def _dispatcher() -> str:
    """Return the name of the Python function that called the operation."""
    frame: Any = sys._getframe(1)
    while frame and any(part in frame.f_code.co_filename.replace("\\", "/") for part in DISPATCHING):
        frame = frame.f_back
    return frame.f_code.co_name if frame else ""


def _counts(t: Any) -> tuple[int, int]:
    return t._use_count(), torch._C._storage_Use_Count(t.untyped_storage()._cdata)


@cache
def sole_reference_counts() -> tuple[int, int]:
    """Return a tensor's and its storage's reference counts, in a dispatch mode, if only the engine has it.

    The counts are measured, because they depend on PyTorch's version. The first call must be outside a
    dispatch.
    """
    with _disable_current_modes(), CpuFakeMode(), torch.enable_grad(), _CountsMode() as mode:
        x = torch.empty(2, 2, requires_grad=True)
        used_twice = x @ x
        ((used_twice @ used_twice).tanh() + used_twice.tanh()).sum().backward()
    return mode.seen[0]


class _CountsMode(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.add.Tensor and not torch.is_grad_enabled():
            self.seen.append(_counts(args[0]))
        return func(*args, **(kwargs or {}))
