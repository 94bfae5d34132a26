"""A polite end: SIGTERM and SIGINT ask the loop to stop after the step it is in."""

import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignal:
    """While entered, the first signal sets ``name``; a second one acts as it did before.

    Outside the main thread Python lets nobody listen to signals: there nothing is changed.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._asked) for number in SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        self._restore()

    def _asked(self, number: int, frame: FrameType | None) -> None:
        self.name = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}
