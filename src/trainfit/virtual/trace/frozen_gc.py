"""While a trace runs, Python's garbage collector passes over what was there before."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_within: ContextVar[bool] = ContextVar("within", default=False)
"""Whether it is done already: to ask the collector takes a look at every object."""


@contextmanager
def frozen_gc() -> Iterator[None]:
    """Within it, a full collection looks at what was made within it, not at every object of torch and transformers.

    One full collection of those takes a quarter of a second, and a plan for 80 layers met one or two. Cycles that the
    traced code makes are found as ever. Nested, or where the caller froze objects himself, it changes nothing.
    """
    if _within.get() or gc.get_freeze_count():
        yield
        return
    gc.freeze()
    token = _within.set(True)
    try:
        yield
    finally:
        _within.reset(token)
        gc.unfreeze()
