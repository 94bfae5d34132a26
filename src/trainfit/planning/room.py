"""How many recipes may be traced at once in the host's free memory. No torch here."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trainfit.spec.host_memory import available_bytes
from trainfit.spec.units import format_bytes

TRACE_BYTES = 2**29
"""Memory that a trace is expected to take until one took more. 8B takes 0.1 GiB, compiled or not; 405B over
tensor-parallel ranks took 4.9."""
HELD_BYTES = 2**30
"""Memory beyond its first that an idle process may keep; one that keeps more is replaced."""
ASK_S = 0.2
"""Time between two looks at the free memory."""


class Room:
    """Lets as many traces begin as fit into free memory, and always one.

    Each of them is expected to take as much as the largest one before. Those that run may have taken only a
    part of theirs yet, so that all of it is kept free for each.

    Args:
        available: returns the bytes that are free now.
    """

    def __init__(self, available: Callable[[], int] = available_bytes):
        self._available = available
        self._changed = threading.Condition()
        self._running, self._is_alone = 0, False
        self.trace_bytes = TRACE_BYTES
        """The most that a trace took."""
        self.least: int | None = None
        """The fewest traces that ran while another one waited for memory; None: none has waited."""
        self.least_free_bytes = 0
        """Free memory at that time."""

    @contextmanager
    def one(self, *, alone: bool = False) -> Iterator[None]:
        """Wait until a trace has room, and keep it while the trace runs.

        Args:
            alone: wait until no other one runs, and let none begin until it has ended.
        """
        with self._changed:
            while self._is_alone or (not alone and self._running and not self._has_room()):
                self._changed.wait(ASK_S)
            self._is_alone = alone
            while alone and self._running:
                self._changed.wait(ASK_S)
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._is_alone = self._is_alone and not alone
                self._changed.notify_all()

    def _has_room(self) -> bool:
        free = self._available()
        if free >= (self._running + 1) * self.trace_bytes:
            return True
        if self.least is None or self._running < self.least:
            self.least, self.least_free_bytes = self._running, free
        return False

    def took(self, peak_bytes: int) -> None:
        """Take note of what a trace took."""
        with self._changed:
            self.trace_bytes = max(self.trace_bytes, peak_bytes)

    def is_too_large(self, held_bytes: int) -> bool:
        """Return whether an idle process keeps too much: more than allowed, or while others lack it."""
        is_scarce = held_bytes > HELD_BYTES // 4 and self._available() < 2 * self.trace_bytes
        return held_bytes > HELD_BYTES or is_scarce

    @property
    def note(self) -> str:
        """What to tell the user; empty: no trace has waited for memory."""
        if self.least is None:
            return ""
        took, free = format_bytes(self.trace_bytes), format_bytes(self.least_free_bytes)
        return (
            f"at times only {self.least} recipe{'s were' if self.least > 1 else ' was'} traced at once: "
            f"one takes up to {took} of the host's memory, and {free} were free"
        )
