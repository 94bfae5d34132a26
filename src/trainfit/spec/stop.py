"""SIGTERM and SIGINT: end a training run after its current step, and other work at once.

Free of torch: the ``trainfit`` command installs the handlers before its first slow import.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from trainfit.spec.errors import EXIT_INTERRUPTED, EXIT_STOPPED, EXIT_TERMINATED

SIGNALS = (signal.SIGTERM, signal.SIGINT)
ENDED_BY = {"SIGINT": EXIT_INTERRUPTED, "SIGTERM": EXIT_TERMINATED}
"""Exit codes of work that cannot be resumed, by the signal that ended it."""
REPEATED_S: dict[int, float] = {signal.SIGTERM: 10.0, signal.SIGINT: 1.0}
"""A second signal within this time is ignored. ``timeout`` and launchers signal the process and its group,
and Python may handle the second only after a call that waits for the device; a person repeats Ctrl-C."""
NOTHING_SAVED = "nothing had been saved: the same command starts again"


class Stopped(BaseException):
    """A signal ended the work; ``saved``: what is saved, and how to continue; empty: it saves nothing.

    Not an ``Exception``, so that error handlers do not swallow it.
    """

    def __init__(self, name: str, saved: str = ""):
        super().__init__(f"{name}: stopped{'; ' * bool(saved)}{saved}")
        self.name, self.saved = name, saved

    @property
    def exit_code(self) -> int:
        """75 for work that can be resumed; otherwise 130 or 143, as shells give them."""
        return EXIT_STOPPED if self.saved else ENDED_BY[self.name]


class StopSignal:
    """Context manager: the first signal sets ``name`` and, if ``raises`` is set, raises ``Stopped``.

    A second signal that ``REPEATED_S`` does not ignore acts as it did before the context. Python allows
    handlers in the main thread only; elsewhere nothing is installed. A signal that an enclosing StopSignal
    received counts here too, in case a library lost its exception.
    """

    def __init__(self, *, raises: bool = False, signals: Sequence[signal.Signals] = SIGNALS) -> None:
        self.name: str | None = None
        self.raises = raises
        self._signals = signals
        self._since_s = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._receive) for number in self._signals}
            outer = [getattr(handler, "__self__", None) for handler in self._before.values()]
            names = [one.name for one in outer if isinstance(one, StopSignal)]
            self.name = self.name or next(filter(None, names), None)
            if self.name is not None and self.raises:
                self._restore()
                raise Stopped(self.name)
        return self

    def __exit__(self, *exception: object) -> None:
        self._restore()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.name is None:
            self.name, self._since_s = signal.Signals(number).name, time.monotonic()
            if self.raises:
                raise Stopped(self.name)
        elif time.monotonic() - self._since_s >= REPEATED_S.get(number, 0.0):
            self._restore()
            os.kill(os.getpid(), number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}


@contextmanager
def resumable(saved: Callable[[], str]) -> Iterator[None]:
    """Raise ``Stopped`` with the text that ``saved`` returns when SIGTERM or SIGINT ends the block.

    The text of an inner block is kept.
    """
    try:
        yield
    except Stopped as error:
        raise Stopped(error.name, error.saved or saved()) from None
    except KeyboardInterrupt:
        raise Stopped("SIGINT", saved()) from None
