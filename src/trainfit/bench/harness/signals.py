"""End a run on SIGTERM or SIGINT, and hold signals off while the result is kept."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Signalled(BaseException):
    """The signal of this name came. Not an ``Exception``: it is no point's result."""


class Signals:
    """Signal handler: the first signal raises ``Signalled``; others and those after ``hold`` are ignored."""

    def __init__(self) -> None:
        self._raises = True

    def hold(self) -> None:
        """Ignore signals from now on, while the result is kept."""
        self._raises = False

    def came(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if self._raises:
            self._raises = False  # A second signal must not interrupt what the first one began.
            raise Signalled(signal.Signals(number).name)


@contextmanager
def signals_raise() -> Iterator[Signals]:
    """Make SIGTERM and SIGINT raise within the context; outside the main thread nothing changes."""
    signals, before = Signals(), dict[int, Any]()
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, signals.came) for number in SIGNALS}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
