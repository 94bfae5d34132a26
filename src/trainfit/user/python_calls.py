"""Count the Python functions that a script calls, for the host's time.

Between two operations on the GPU the host runs the script's Python: modules, wrappers, hooks, autocast's and
recomputation's bookkeeping, the collation of a batch. The number of calls predicts how long that takes.
Resumed generators are not counted (a walk over a model's modules resumes thousands, each far cheaper than a
call), and neither are functions written in C.
"""

import sys
from inspect import CO_GENERATOR
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import trainfit

OWN = f"{Path(trainfit.__file__).parent}/"
TORCH = f"{Path(torch.__file__).parent}/"
FAKE = tuple(
    TORCH + name
    for name in (
        "_subclasses/", "_ops.py", "overrides.py", "utils/_python_dispatch.py", "_dynamo/eval_frame.py",
        "_dynamo/external_utils.py", "_compile.py", "compiler/__init__.py", "_library/",
    )
)  # fmt: skip
"""PyTorch's code that runs because tensors are fake or a mode is on."""
COMPILER = tuple(TORCH + name for name in ("_dynamo/", "_functorch/", "_inductor/"))
"""PyTorch's compiler, which runs once and not in each step; calls of compiled code are counted separately."""
MODULE = f"{TORCH}nn/modules/module.py"
WITH_HOOKS = "inner"
"""The part of a module's call that runs for hooks, which the trace has on every module."""
PASSES_ON = frozenset({"__torch_function__", "run", "evaluated"})
"""Functions of the virtual GPU that call the user's code, or PyTorch's on its behalf."""


class PythonCalls:
    """Calls since they were last taken; none between ``pause`` and ``resume``, for the virtual GPU's own."""

    def __init__(self) -> None:
        self._number = 0
        self._is_counting = False
        self._hook = self._count  # One object: a method is another one each time.
        self._own: FrameType | None = None
        """The running outermost call of the virtual GPU's code, or of the compiler's."""
        self._kinds: dict[str, tuple[bool, bool]] = {}
        """File name -> whether it is the virtual GPU's or the compiler's, with all that it calls, and whether
        it runs because tensors are fake."""

    def start(self) -> bool:
        """Count from now on; return False where another profiler runs in this thread, which goes on."""
        if not self._is_counting:
            if sys.getprofile() is not None:
                return False
            self._is_counting = True
            sys.setprofile(self._hook)
        return True

    def stop(self) -> None:
        """Count no longer."""
        self._is_counting = False
        if sys.getprofile() is self._hook:
            sys.setprofile(None)

    def pause(self) -> bool:
        """Stop counting until ``resume``; return whether it was counting."""
        counted = sys.getprofile() is self._hook
        if counted:
            sys.setprofile(None)
        return counted

    def resume(self) -> None:
        """Count again after a pause."""
        sys.setprofile(self._hook)

    def take(self) -> int:
        """Return the number of calls since the last one."""
        number, self._number = self._number, 0
        return number

    def _count(self, frame: FrameType, event: str, argument: Any) -> None:
        if self._own is not None:
            if event == "return" and frame is self._own:
                self._own = None
            return
        code = frame.f_code
        if event != "call" or code.co_flags & CO_GENERATOR:
            return
        name = code.co_filename
        kind = self._kinds.get(name)
        if kind is None:
            is_fake = name.startswith(FAKE)
            is_own = name.startswith(OWN) or (name.startswith(COMPILER) and not is_fake)
            kind = self._kinds[name] = is_own, is_fake
        is_own, is_fake = kind
        if is_own:
            if code.co_name not in PASSES_ON:
                self._own = frame
        elif not is_fake and not (code.co_name == WITH_HOOKS and name == MODULE):
            self._number += 1
