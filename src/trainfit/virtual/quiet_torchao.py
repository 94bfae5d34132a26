"""Silence what importing torchao logs. transformers imports it wherever it is installed."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from trainfit.virtual.trace.exclusive import exclusive

LOGGERS = ("torchao", "torch.utils._pytree")
"""Loggers that warn while torchao is imported: "Failed to load" for each of its compiled kernels that is for
another machine, and torch's warning about a call of torchao's. None of them is used here."""
_turns = threading.RLock()


@contextmanager
def quiet_torchao() -> Iterator[None]:
    """Silence the warnings of torchao's import, for every thread, around an import that may include it."""
    with exclusive(), silenced():
        yield


@contextmanager
def silenced() -> Iterator[None]:
    """Do as ``quiet_torchao``, also beside a trace of another thread."""
    with _turns:
        loggers = [logging.getLogger(name) for name in LOGGERS]
        before = [one.level for one in loggers]
        for one in loggers:
            one.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for one, level in zip(loggers, before, strict=True):
                one.setLevel(level)
