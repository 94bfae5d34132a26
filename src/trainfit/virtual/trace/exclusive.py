"""One trace at a time in a process: ``exclusive`` is a re-entrant lock.

``replaced`` changes PyTorch's functions for the tracing thread alone, so that another thread can train.
"""

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any

from trainfit.spec.private_names import read


class _Holder:
    """The lock and the thread that holds it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.thread: int | None = None

    def after_fork(self) -> None:
        """Release the lock in a forked child, which does not have the holding thread."""
        if self.thread != threading.get_ident():
            self.__init__()


_holder = _Holder()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_holder.after_fork)


@contextmanager
def exclusive() -> Iterator[None]:
    """Hold the tracing lock, which is re-entrant; another thread waits."""
    with _holder.lock:
        before = _holder.thread
        _holder.thread = threading.get_ident()
        try:
            yield
        finally:
            _holder.thread = before


def is_tracing_thread() -> bool:
    """Return whether the calling thread is the one that traces."""
    return threading.get_ident() == _holder.thread


# As torch.compiler.assume_constant_result: Dynamo calls it instead of tracing into the threading module.
is_tracing_thread._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of another library, or set a missing one, while entered, within ``exclusive``.

    Functions, methods and properties change for the tracing thread alone, classes and tables for every
    thread.
    """
    assert not _is_ours(owner), f"{owner}.{name}: trainfit's own objects take observers or arguments"
    with exclusive():
        inherited = name not in vars(owner)
        before = None if inherited else vars(owner)[name]
        is_outermost = (id(owner), name) not in _originals
        if is_outermost and hasattr(owner, name):
            _originals[id(owner), name] = read(owner, name)
        setattr(owner, name, _for_tracing_thread(value, getattr(owner, name, _nothing)))
        try:
            yield
        finally:
            if is_outermost:
                _originals.pop((id(owner), name), None)
            if inherited:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


_originals: dict[tuple[int, str], Any] = {}
"""(identity of an owner, name) -> the original value, while it is replaced."""


def stored(owner: Any, name: str) -> Any:
    """Return an attribute as its owner stores it (``private_names.read``), also while it is replaced."""
    key = (id(owner), name)
    return _originals[key] if key in _originals else read(owner, name)


def _is_ours(owner: Any) -> bool:
    module = owner.__name__ if isinstance(owner, ModuleType) else getattr(owner, "__module__", None)
    return str(module).partition(".")[0] == "trainfit"


def _for_tracing_thread(value: Any, original: Any) -> Any:
    if isinstance(value, staticmethod):
        return staticmethod(_for_tracing_thread(value.__func__, original))
    if isinstance(value, property):
        get = chosen_by_thread(value.__get__, original.__get__)
        return property(lambda self: get(self, type(self)), value.fset)
    if isinstance(value, FunctionType | MethodType) and callable(original) and not isinstance(original, type):
        return chosen_by_thread(value, original)
    return value


def _nothing(*_: Any) -> None:
    """Do nothing: a hook on another thread."""


def chosen_by_thread(
    value: Callable[..., Any], original: Callable[..., Any] = _nothing
) -> Callable[..., Any]:
    """Return a function that calls ``value`` on the tracing thread and ``original`` on any other."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return value(*args, **kwargs) if is_tracing_thread() else original(*args, **kwargs)

    # Dynamo inspects the signature of some of the replaced functions.
    return functools.update_wrapper(call, value, assigned=(), updated=())
