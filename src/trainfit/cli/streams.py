"""Standard streams: closed or full ones, and messages that libraries write to them."""

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from trainfit.spec.printable import printable, say


def flush_or_drop(stream: TextIO) -> bool:
    """Flush a standard stream; if that fails, redirect it to the null device and return False."""
    try:
        stream.flush()
    except OSError:
        with suppress(OSError):  # No file descriptor, as under pytest.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return False
    return True


def has_streams() -> bool:
    """Return whether standard output is open; occupy closed descriptors, or files would get their numbers."""
    closed = [stream is None for stream in (sys.stdin, sys.stdout, sys.stderr)]
    if not any(closed):
        return True
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for name in ("stderr", "stdout"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for the whole process
    if closed[1]:
        say("trainfit: error: standard output is closed; open it, or send it to a file", err=True)
    return not closed[1]


@contextmanager
def plain_messages() -> Iterator[None]:
    """Escape control characters in warnings and log messages, which quote names from configs."""
    made, formatted = logging.getLogRecordFactory(), warnings.formatwarning

    def record(*arguments: Any, **options: Any) -> logging.LogRecord:
        one = made(*arguments, **options)
        try:
            one.msg, one.args = printable(one.getMessage(), lines=True), ()
        except (TypeError, ValueError):  # The handler reports messages that do not fit their arguments.
            one.msg = printable(str(one.msg), lines=True)
        return one

    def warning(*arguments: Any, **options: Any) -> str:
        return printable(formatted(*arguments, **options), lines=True)

    logging.setLogRecordFactory(record)
    warnings.formatwarning = warning
    try:
        yield
    finally:
        logging.setLogRecordFactory(made)
        warnings.formatwarning = formatted
