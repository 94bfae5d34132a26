"""Run a kernel's launcher without a GPU or Triton: tensors are allocated, kernels are not launched.

A dry launcher is the launcher's own code, with a stand-in that accepts any call for every import from Triton
and every kernel of this package. Given fake tensors it allocates and frees tensors in the same order as on a
GPU.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any


def holds_kernels(package: str, module: str) -> bool:
    """Return whether a module holds kernels, or code that only launches need; none of it allocates a tensor.

    Kernels are in ``triton.py``, ``*_triton.py`` and ``triton_*.py`` of an operation's folder, and in
    ``hopper/``. The launchers, ``triton_launch.py`` and ``hopper/launch.py``, allocate.
    """
    if module.endswith("launch"):
        return False
    if package.endswith(".hopper"):
        return True
    return package.startswith("trainfit.") and (module.endswith("triton") or module.startswith("triton_"))


class StandIn:
    """Object with every attribute, every call and the arithmetic that launchers do on constants."""

    def __call__(self, *args: Any, **kwargs: Any) -> StandIn:
        return self

    def __gt__(self, other: Any) -> bool:
        return False

    __getattr__ = __getitem__ = __mul__ = __rmul__ = __add__ = __radd__ = __call__
    __sub__ = __rsub__ = __floordiv__ = __rfloordiv__ = __call__


def dry_launcher(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a top-level launcher and its module's functions, with stand-ins for imports."""
    return _functions(launcher.__module__)[launcher.__name__]


@cache
def _functions(module_name: str) -> dict[str, Any]:
    module = vars(sys.modules[module_name])
    names = {**module, "__builtins__": {**vars(builtins), "__import__": _import}}
    for name, value in module.items():
        if isinstance(value, FunctionType) and value.__module__ == module_name:
            copy = FunctionType(value.__code__, names, name, value.__defaults__, value.__closure__)
            copy.__kwdefaults__ = value.__kwdefaults__
            names[name] = copy
    return names


def _import(
    name: str, module_globals: Any = None, module_locals: Any = None, fromlist: Any = (), level: int = 0
) -> Any:
    if name.partition(".")[0] == "triton":
        return StandIn()
    if fromlist and all(holds_kernels(name, each) for each in fromlist):
        return StandIn()
    return builtins.__import__(name, module_globals, module_locals, fromlist, level)
