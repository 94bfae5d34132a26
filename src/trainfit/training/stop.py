"""SIGTERM and SIGINT: work that has something to save ends after its current step, other work ends at once.

No torch here: ``trainfit`` listens before its first slow import.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)
REPEATED_S = 1.0
"""A signal that follows the first one sooner is the same one: ``timeout`` sends it to the process and to its group."""
NOTHING_SAVED = "nothing had been saved: the same command starts again"


class Stopped(BaseException):
    """A signal ended the work. No ``Exception``, so that nothing that handles failures swallows it.

    Args:
        name: the signal's.
        saved: what is saved and what goes on from it.
    """

    def __init__(self, name: str, saved: str = NOTHING_SAVED):
        super().__init__(f"{name}: stopped; {saved}")
        self.name, self.saved = name, saved


class StopSignal:
    """While entered, the first signal sets ``name`` and, where ``raises`` is on, raises ``Stopped``.

    A second signal, at least ``REPEATED_S`` later, acts as it did before. Outside the main thread Python lets nobody
    listen to signals: there nothing is changed. A signal that an outer StopSignal has taken before is this one's too,
    in case its exception was lost in a library.
    """

    def __init__(self, *, raises: bool = False, signals: Sequence[signal.Signals] = SIGNALS) -> None:
        self.name: str | None = None
        self.raises = raises
        self._signals = signals
        self._since_s = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._came) for number in self._signals}
            outer = [getattr(handler, "__self__", None) for handler in self._before.values()]
            names = [one.name for one in outer if isinstance(one, StopSignal) and one.name is not None]
            self.name = self.name or next(iter(names), None)
            if self.name is not None and self.raises:
                self._restore()
                raise Stopped(self.name)
        return self

    def __exit__(self, *exception: object) -> None:
        self._restore()

    def _came(self, number: int, frame: FrameType | None) -> None:
        if self.name is None:
            self.name, self._since_s = signal.Signals(number).name, time.monotonic()
            if self.raises:
                raise Stopped(self.name)
        elif time.monotonic() - self._since_s >= REPEATED_S:
            self._restore()
            os.kill(os.getpid(), number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}


@contextmanager
def resumable(saved: Callable[[], str]) -> Iterator[None]:
    """Make a signal that ends the block a ``Stopped`` that tells what ``saved`` returns then.

    Raises:
        Stopped: SIGTERM, or SIGINT as Python raises it.
    """
    try:
        yield
    except Stopped as stopped:
        raise Stopped(stopped.name, saved()) from None
    except KeyboardInterrupt:
        raise Stopped("SIGINT", saved()) from None
