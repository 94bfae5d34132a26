"""Gradients that the autograd engine adds up before a node runs: in place on a GPU, never on fake tensors.

Where a tensor was used twice, the engine keeps the first gradient that arrives and adds the next. It does so in place if
nobody else holds the first one; it never does for tensor subclasses or under a dispatch mode, which is what the virtual
GPU is. One tensor of the size of the gradient is then too much: 1.2 GB where a word embedding is tied to the output. A
gradient that only Python code keeps (a hook that stores it) is taken for free.

Source: torch/csrc/autograd/input_buffer.cpp (``can_accumulate_inplace``, ``accumulate``).
"""

import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

aten = torch.ops.aten
ENGINE = "_engine_run_backward"
"""The Python function that calls the engine: what the engine and C++ nodes dispatch comes from its frame."""
DISPATCHING = ("trainfit/virtual/", "torch/_compile.py", "torch/_dynamo/eval_frame.py")
"""Files whose frames lie between an operation and the dispatch mode that sees it."""


def as_the_engine_does(func: Any, args: Any, kwargs: Any) -> Any:
    """``aten.add_`` in place of the ``aten.add`` that the engine would do in place on a GPU, else ``func``."""
    if func is not aten.add.Tensor or torch.is_grad_enabled() or kwargs or len(args) != 2:
        return func
    first, second = args
    if not isinstance(second, Tensor) or first.shape != second.shape or first.dtype != second.dtype:
        return func
    if not is_non_overlapping_and_dense_or_false(first) or _counts(first) != held_by_engine_alone():
        return func
    return aten.add_.Tensor if _dispatcher() == ENGINE else func


def _dispatcher() -> str:
    """Name of the Python function that the operation came from."""
    frame: Any = sys._getframe(1)
    while frame and any(part in frame.f_code.co_filename.replace("\\", "/") for part in DISPATCHING):
        frame = frame.f_back
    return frame.f_code.co_name if frame else ""


def _counts(t: Any) -> tuple[int, int]:
    return t._use_count(), torch._C._storage_Use_Count(t.untyped_storage()._cdata)


@cache
def held_by_engine_alone() -> tuple[int, int]:
    """Uses of a tensor and of its storage, as a dispatch mode sees them, when only the engine keeps the tensor.

    They depend on how many references a version of PyTorch takes on the way to the mode; so they are looked at. The first
    call must come from outside a dispatch, where autograd works.
    """
    with _disable_current_modes(), FakeTensorMode(), torch.enable_grad(), _Looking() as looking:
        x = torch.empty(2, 2, requires_grad=True)
        used_twice = x @ x
        ((used_twice @ used_twice).tanh() + used_twice.tanh()).sum().backward()
    return looking.seen[0]


class _Looking(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.add.Tensor and not torch.is_grad_enabled():
            self.seen.append(_counts(args[0]))
        return func(*args, **(kwargs or {}))
