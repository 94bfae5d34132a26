"""A random generator of the trace's own for tensors on the host, so that a trace draws nothing from the process's.

PyTorch's default CPU generator belongs to the whole process: putting its state back after a trace would also take back what
another thread drew meanwhile.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trainfit.virtual.exclusive import is_tracing_thread, replaced

_own: list[torch.Generator] = []
"""Generators of the traces that are entered, innermost last. Only the tracing thread reads or changes it."""


@contextmanager
def own_generator() -> Iterator[None]:
    """Give the tracing thread a generator of its own, in the state that the default one has now.

    ``torch.manual_seed``, ``torch.get_rng_state``, ``torch.set_rng_state`` and ``torch.random.fork_rng`` act on it, and
    operations on host tensors that the tracer sees draw from it (``draw``).
    """
    generator = torch.Generator()
    generator.set_state(torch.get_rng_state())
    with replaced(torch.random, "default_generator", _DefaultGenerator(torch.random.default_generator)):
        _own.append(generator)
        try:
            yield
        finally:
            _own.pop()


def draw(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run an operation that draws random numbers; on the tracing thread from the trace's own generator.

    Not every such operation takes a generator as an argument, so the default one lends its state for the call.
    """
    if not _own or not is_tracing_thread():
        return func(*args, **kwargs)
    own, default = _own[-1], torch.default_generator
    before = default.get_state()
    default.set_state(own.get_state())
    try:
        return func(*args, **kwargs)
    finally:
        own.set_state(default.get_state())
        default.set_state(before)


class _DefaultGenerator:
    """``torch.random``'s ``default_generator``: the trace's own on the tracing thread, PyTorch's on any other."""

    def __init__(self, default: Any):
        self._default = default

    def __getattr__(self, name: str) -> Any:
        return getattr(_own[-1] if _own and is_tracing_thread() else self._default, name)
