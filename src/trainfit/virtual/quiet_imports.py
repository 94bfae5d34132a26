"""Silence what importing torchao and bitsandbytes logs. transformers and peft import them if installed."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from trainfit.virtual.trace.exclusive import exclusive

LOGGERS = ("torchao", "torch.utils._pytree", "bitsandbytes.backends.cpu.ops")
"""Loggers that warn during these imports: "Failed to load" for each compiled kernel of torchao that is for
another machine and for a kernel of bitsandbytes for processors, and torch's warning about a call of
torchao's. None of these kernels is used here."""
_turns = threading.RLock()


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Silence the warnings of these imports, for every thread, around one that may include them."""
    with exclusive(), silenced():
        yield


@contextmanager
def silenced() -> Iterator[None]:
    """Do as ``quiet_imports``, also beside a trace of another thread."""
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
