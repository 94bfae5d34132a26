"""Shorten the start and the end of a command that predicts: imports that an eager step does not need.

For a process that is the command's own: a library's modules are loaded in another order, never differently.
"""

import atexit
import functools
import gc
import importlib
import importlib.machinery
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from trainfit.models.deferred_torchao import defer_torchao
from trainfit.virtual import own_process

COMPILER = {
    "torch._dynamo": ("config", "_trace_wrapped_higher_order_op"),
    "torch._inductor": ("config",),
}
"""Packages whose import takes a second, and their modules that eager code needs: ``FakeTensorMode`` reads
settings, transformers' masks use one class."""
SCAN = "transformers.utils.import_utils"
TEMPLATES = "torch._inductor.codegen.common"
SOURCE = "torch._dynamo.source"


def import_little(*, compiles: bool) -> None:
    """Prepare a process of the command's own for predictions. What is left out is imported when it is used.

    Args:
        compiles: the compiler is needed anyway.
    """
    if not own_process.is_own_process:
        return
    gc.disable()  # Collections while modules are imported take a second, and find nothing.
    loaders: dict[str, Callable[[Any, Callable[[Any], None]], None]] = {
        SCAN: _scan_less,
        TEMPLATES: _compile_later,
    }
    if not compiles:
        loaders |= dict.fromkeys(COMPILER, _defer)
    defer_torchao()
    sys.meta_path.insert(0, _Finder(loaders))  # pyright: ignore[reportArgumentType]


def leave(code: int) -> int:
    """End the process at once: taking a million objects apart takes a second. Return where that is unsafe."""
    torch = sys.modules.get("torch")
    if torch is None or own_process.has_threads() or torch.cuda.is_initialized():
        return code
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return code
    os._exit(code)


class _Finder:
    """Loads some modules by functions of the module and its own loader's."""

    def __init__(self, loaders: dict[str, Callable[[Any, Callable[[Any], None]], None]]):
        self._loaders = loaders

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        load = self._loaders.get(name)
        spec: Any = None if load is None else importlib.machinery.PathFinder.find_spec(name, path)
        if load is not None and spec is not None:
            run = spec.loader.exec_module
            spec.loader.exec_module = lambda module: load(module, run)
        return spec


def _scan_less(module: Any, run: Callable[[Any], None]) -> None:
    """Shorten transformers' scan of its 1,600 model files, which it does twice; the result is the same."""
    run(module)
    names = getattr(module, "fetch__all__", None)
    scan: Any = getattr(module, "create_import_structure_from_path", None)
    if names is not None:
        # It splits a file into lines and looks for the last one that begins with __all__.
        module.fetch__all__ = lambda text: names(text[text.rfind("\n__all__") + 1 :])
    if hasattr(scan, "__wrapped__"):
        module.create_import_structure_from_path = functools.cache(
            scan.__wrapped__
        )  # Not the last 128 alone.


class _Template:
    """A Jinja template that is compiled when it is used."""

    def __init__(self, compiled: Callable[[], Any]):
        self._compiled = compiled

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._compiled(), name)


def _compile_later(module: Any, run: Callable[[Any], None]) -> None:
    """Leave Inductor's templates of kernels uncompiled, of which hardly any is used."""
    run(module)
    compiled = functools.cache(module.KernelTemplate._template_from_string)

    def template(source: str) -> _Template:
        return _Template(functools.partial(compiled, source))

    module.KernelTemplate._template_from_string = staticmethod(template)


class _Name:
    """Name of a real tensor. It is read where sizes are symbols, which Dynamo makes."""

    def __init__(self, *names: object):
        self.names = names


class _Source(ModuleType):
    """Stand-in of a module of classes that name the real tensors that ``FakeTensorMode`` converts."""

    def __getattr__(self, name: str) -> Any:
        if not name.endswith("Source"):
            raise AttributeError(name)
        made = type(name, (_Name,), {})
        setattr(self, name, made)
        return made


class _Deferred(ModuleType):
    """A package whose ``__init__`` runs when anything in it but ``COMPILER``'s modules is used."""

    def __getattr__(self, name: str) -> Any:
        object.__setattr__(self, "__class__", ModuleType)
        for own in UNLOADED:
            vars(self).pop(own, None)
        spec: Any = self.__spec__
        self.__path__ = spec.submodule_search_locations
        if isinstance(sys.modules.get(SOURCE), _Source):
            del sys.modules[SOURCE]
        _runs[self.__name__](self)
        for each in _waiting.pop(self.__name__, ()):
            each(self)
        return getattr(self, name)


def _defer(module: Any, run: Callable[[Any], None]) -> None:
    _runs[module.__name__] = run
    try:
        for inner in COMPILER[module.__name__]:
            importlib.import_module(f"{module.__name__}.{inner}")
    except ImportError:
        return run(module)  # Another version's modules.
    module.__class__ = _Deferred
    del module.__path__  # Without it the import of any other module in the package asks for it.
    if module.__name__ == "torch._dynamo":
        vars(module).update(UNLOADED)
        sys.modules[SOURCE] = _Source(SOURCE)


_runs: dict[str, Callable[[Any], None]] = {}
"""Deferred package -> what runs its ``__init__``."""
_waiting: dict[str, list[Callable[[Any], object]]] = {}
"""Package -> what is done when it is loaded: the decorations of functions that were made before."""


def _disable(fn: Any = None, recursive: bool = True, *, wrapping: bool = True, **settings: Any) -> Any:
    """Decorate as ``torch._dynamo.disable``, which has no effect before Dynamo is loaded."""
    waiting = _waiting.setdefault("torch._dynamo", [])
    if fn is None:
        return functools.partial(_disable, recursive=recursive, wrapping=wrapping, **settings)
    if not wrapping:
        # torch._compile keeps the result in this attribute, else it asks again.
        waiting.append(lambda _: vars(fn).pop("__dynamo_disable", None))
        return fn
    target = [fn]
    waiting.append(lambda dynamo: target.__setitem__(0, dynamo.disable(fn, recursive, **settings)))

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        return target[0](*args, **kwargs)

    return call


def _marked(name: str) -> Callable[[Any], Any]:
    """Return a decorator that returns its function, as the one of this name does, which it gets later."""

    def mark(fn: Any) -> Any:
        _waiting.setdefault("torch._dynamo", []).append(lambda dynamo: getattr(dynamo, name)(fn))
        return fn

    return mark


class _Rules:
    """Stand-in of ``trace_rules``, whose cache each new process group clears."""

    def clear_lru_cache(self) -> None:
        """Do nothing: Dynamo, which is not loaded, has cached nothing."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("torch._dynamo.trace_rules"), name)


UNLOADED = {
    "trace_rules": _Rules(),
    "graph_break": lambda *_, **__: None,
    "disable": _disable,
    "assume_constant_result": _marked("assume_constant_result"),
    "allow_in_graph": _marked("allow_in_graph"),
}
"""What eager code uses of Dynamo, while it is not loaded."""
