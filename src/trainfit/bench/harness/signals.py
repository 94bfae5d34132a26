"""Signals that end a run: they are heard while it measures, and held off while what was measured is kept."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Signalled(BaseException):
    """The signal of this name came. No ``Exception``: it is no point's result."""


class Signals:
    """What a signal does: the first one raises ``Signalled``, later ones and those after ``hold`` do nothing."""

    def __init__(self) -> None:
        self._raises = True

    def hold(self) -> None:
        """From now on what was measured is being kept, which takes a moment and must not be cut."""
        self._raises = False

    def came(self, number: int, frame: FrameType | None) -> None:
        """The handler."""
        if self._raises:
            self._raises = False  # A second one must not cut what the first one began.
            raise Signalled(signal.Signals(number).name)


@contextmanager
def signals_heard() -> Iterator[Signals]:
    """SIGTERM and SIGINT raise in here. Outside the main thread Python lets nobody listen to them: there nothing is changed."""
    signals, before = Signals(), dict[int, Any]()
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, signals.came) for number in SIGNALS}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
