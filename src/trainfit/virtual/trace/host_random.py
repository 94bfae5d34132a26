"""A random generator of the trace's own for tensors on the host.

PyTorch's default CPU generator belongs to the whole process: putting its state back after a trace would also
take back what another thread drew meanwhile.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from trainfit.virtual.trace.exclusive import is_tracing_thread, replaced

_own: list[torch.Generator] = []
"""Generators of the traces that are entered, innermost last. Only the tracing thread reads or changes it."""


@contextmanager
def own_generator() -> Iterator[None]:
    """Give the tracing thread a generator of its own, in the state that the default one has now.

    ``torch.manual_seed``, ``torch.get_rng_state``, ``torch.set_rng_state`` and ``torch.random.fork_rng`` act
    on it; operations on host tensors that the tracer sees draw from it (``draw``).
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
    """Run an operation that draws random numbers; on the tracing thread from the trace's own generator."""
    if not _own or not is_tracing_thread():
        return func(*args, **kwargs)
    taking = _taking_generator(func)
    if taking is None:
        return _draw_from_lent_state(func, args, kwargs)
    return taking(*args, **{**kwargs, "generator": kwargs.get("generator") or _own[-1]})


@cache
def _taking_generator(func: Any) -> Any:
    """Return the operation, or its overload, that takes a generator as a keyword; None if there is none."""
    name = func._overloadname
    for each in (name, "generator" if name == "default" else f"{name}_generator"):
        found = getattr(func.overloadpacket, each, None)
        if found is not None and any(a.name == "generator" and a.kwarg_only for a in found._schema.arguments):
            return found
    return None


def _draw_from_lent_state(func: Any, args: Any, kwargs: Any) -> Any:
    """The default generator lends its state for one call; a number that another thread draws meanwhile is repeated."""
    own, default = _own[-1], torch.default_generator
    before = default.get_state()
    default.set_state(own.get_state())
    try:
        return func(*args, **kwargs)
    finally:
        own.set_state(default.get_state())
        default.set_state(before)


class _DefaultGenerator:
    """The default generator: the trace's own on the tracing thread, PyTorch's on any other."""

    def __init__(self, default: Any):
        self._default = default

    def __getattr__(self, name: str) -> Any:
        return getattr(_own[-1] if _own and is_tracing_thread() else self._default, name)
