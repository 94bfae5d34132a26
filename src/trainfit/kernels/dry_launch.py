"""Launchers run without a GPU and without Triton: what they allocate is real, their launches do nothing.

A dry launcher is the launcher's own code; only what it imports from Triton, and the kernels that it imports from
files of this package, are answered by a stand-in that takes every call. So given fake tensors it makes and drops the
same tensors in the same order as on a GPU, and no second list of them can fall behind. The virtual GPU asks for it.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any


def holds_kernels(package: str, module: str) -> bool:
    """Return whether a module holds kernels or what only their launches need: nothing there makes a tensor.

    Kernels are in ``triton.py``, ``*_triton.py`` and ``triton_*.py`` of an operation's folder, and in ``hopper/``; the
    launchers, ``triton_launch.py`` and ``hopper/launch.py``, make the tensors.
    """
    if module.endswith("launch"):
        return False
    if package.endswith(".hopper"):
        return True
    return package.startswith("trainfit.") and (module.endswith("triton") or module.startswith("triton_"))


class StandIn:
    """Has every attribute, takes every call and launch, and counts as any number."""

    def __getattr__(self, name: str) -> StandIn:
        return self

    def __getitem__(self, key: Any) -> StandIn:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> StandIn:
        return self

    def __mul__(self, other: Any) -> StandIn:
        return self

    def __gt__(self, other: Any) -> bool:
        return False

    __rmul__ = __add__ = __radd__ = __sub__ = __rsub__ = __floordiv__ = __rfloordiv__ = __mul__


def dry_launcher(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """The launcher, a function of a module's top level, and the module's functions that it calls, without launches."""
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
    name: str, module_globals: Any = None, module_locals: Any = None, wanted: Any = (), level: int = 0
) -> Any:
    if name.partition(".")[0] == "triton":
        return StandIn()
    if wanted and all(holds_kernels(name, each) for each in wanted):
        return StandIn()
    return builtins.__import__(name, module_globals, module_locals, wanted, level)
