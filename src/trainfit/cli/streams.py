"""The process's standard streams: closed or full ones, and what libraries write to them."""

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from trainfit.spec.printable import printable, say


def flush_or_drop(stream: TextIO) -> bool:
    """Flush a standard stream; where that fails, what follows goes nowhere, and False is returned."""
    try:
        stream.flush()
    except OSError:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        except OSError:  # No file behind it, as under a test: nothing is flushed when the process ends.
            return False
        return False
    return True


def has_streams() -> bool:
    """Whether there is a standard output. A closed descriptor is filled, or the next file opened would become it."""
    closed = [stream is None for stream in (sys.stdin, sys.stdout, sys.stderr)]
    if not any(closed):
        return True
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for the whole process
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the whole process
        say("trainfit: error: standard output is closed; open it, or send it to a file", err=True)
    return not closed[1]


@contextmanager
def plain_messages() -> Iterator[None]:
    """Escape control characters in what libraries warn of and log: a config's names are among it."""
    made, formatted = logging.getLogRecordFactory(), warnings.formatwarning

    def record(*arguments: Any, **options: Any) -> logging.LogRecord:
        one = made(*arguments, **options)
        try:
            one.msg, one.args = printable(one.getMessage(), lines=True), ()
        except (TypeError, ValueError):  # Its handler reports a message that does not fit its arguments.
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
