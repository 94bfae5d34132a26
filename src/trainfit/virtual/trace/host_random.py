"""A separate random generator for a trace's host tensors, so that other threads' draws stay as they are."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from trainfit.virtual.trace.exclusive import is_tracing_thread, replaced

_own: list[torch.Generator] = []
"""Generators of nested traces, innermost last; used by the tracing thread alone."""


@contextmanager
def own_generator() -> Iterator[None]:
    """Give the tracing thread its own generator, with the default one's current state.

    ``torch.manual_seed``, ``torch.get_rng_state`` and ``torch.random.fork_rng`` act on it, and ``draw`` draws
    from it.
    """
    generator = torch.Generator()
    generator.set_state(torch.get_rng_state())
    with replaced(torch.random, "default_generator", _DefaultGenerator(torch.random.default_generator)):
        _own.append(generator)
        try:
            yield
        finally:
            _own.pop()


def draw(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation that draws random numbers, on the tracing thread from the trace's generator."""
    if not _own or not is_tracing_thread():
        return func(*args, **kwargs)
    overload = _overload_with_generator(func)
    if overload is None:
        return _draw_with_swapped_state(func, args, kwargs)
    return overload(*args, **{**kwargs, "generator": kwargs.get("generator") or _own[-1]})


@cache
def _overload_with_generator(func: Any) -> Any:
    """Return the overload that takes a generator as a keyword; None if there is none."""
    name = func._overloadname
    for each in (name, "generator" if name == "default" else f"{name}_generator"):
        found = getattr(func.overloadpacket, each, None)
        if found is not None and any(a.name == "generator" and a.kwarg_only for a in found._schema.arguments):
            return found
    return None


def _draw_with_swapped_state(func: Any, args: Any, kwargs: Any) -> Any:
    """Swap the default generator's state for one call; a concurrent draw of another thread is repeated."""
    own, default = _own[-1], torch.default_generator
    before = default.get_state()
    default.set_state(own.get_state())
    try:
        return func(*args, **kwargs)
    finally:
        own.set_state(default.get_state())
        default.set_state(before)


class _DefaultGenerator:
    """Proxy of the default generator: the trace's own on the tracing thread, PyTorch's on others."""

    def __init__(self, default: Any):
        self._default = default

    def __getattr__(self, name: str) -> Any:
        return getattr(_own[-1] if _own and is_tracing_thread() else self._default, name)
