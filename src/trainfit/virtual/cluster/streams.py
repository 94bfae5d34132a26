"""Find when a collective of FSDP2 may begin and where the computation waits for it, from streams and events.

On a CPU PyTorch's streams and events are classes that do nothing; here they record what they order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from trainfit.virtual.trace.exclusive import replaced
from trainfit.virtual.trace.observer import Observer
from trainfit.virtual.trace.tracer import Tracer


class Point(NamedTuple):
    """A point of a stream."""

    op: int
    """Index of the last operation of the computation that has finished at this point."""
    collective: int
    """Index of the last collective that has finished at this point; -1: none."""


class Order(Observer):
    """Tracks the point that each stream has waited for. The first stream computes.

    Given to the tracer after the observer that records collectives.
    """

    def __init__(self) -> None:
        self._computes = torch.cpu.current_stream()
        self._points: dict[Any, Point] = {}
        self._host_waited_for = -1
        """Index of the last operation that the host has waited for."""
        self._num_issued = 0

    def attach(self, tracer: Tracer) -> None:
        super().attach(tracer)
        self._ledger = tracer.ledger

    def communicates(self, func: Any, args: Any) -> None:
        if len(self._ledger.collectives) > self._num_issued:
            self._issued(len(self._ledger.collectives) - 1)
        self._num_issued = len(self._ledger.collectives)

    def host_waits(self) -> None:
        """Record that the host waits, to read a value for example: later operations begin after it."""
        self.tracer.count_read()
        self._host_waited_for = len(self._ledger.ops) - 1

    def point(self, stream: Any) -> Point:
        """Return the present point of a stream."""
        if stream is self._computes:
            return Point(len(self._ledger.ops) - 1, -1)
        return self._points.get(stream, Point(-1, -1))

    def wait(self, stream: Any, point: Point | None) -> None:
        """Let a stream wait for a point of another one."""
        if point is None:
            return
        if stream is self._computes:
            self._computation_waits(point.collective)
            return
        here = self.point(stream)
        self._points[stream] = Point(max(here.op, point.op), max(here.collective, point.collective))

    def _computation_waits(self, collective: int) -> None:
        if collective >= 0 and self._ledger.collectives[collective].waited_at < 0:
            one = self._ledger.collectives[collective]
            now = len(self._ledger.ops) - 1
            self._ledger.collectives[collective] = one._replace(waited_at=now)

    def _issued(self, collective: int) -> None:
        stream = torch.cpu.current_stream()
        if stream is not self._computes:
            after = max(self.point(stream).op, self._host_waited_for)
            self._points[stream] = Point(after, collective)
            one = self._ledger.collectives[collective]
            self._ledger.collectives[collective] = one._replace(begins_after=after)


@contextmanager
def ordered_collectives(order: Order) -> Iterator[None]:
    """Report the events that streams record and wait for to the order.

    Each collective on a stream of its own then has the operation after which it may begin, and the one that
    waits for it.
    """

    def record(self: Any, stream: Any = None) -> Any:
        self.point = order.point(torch.cpu.current_stream() if stream is None else stream)
        return self

    def record_event(self: Any) -> Any:
        event: Any = torch.cpu.Event()
        event.point = order.point(self)
        return event

    def wait_event(self: Any, event: Any) -> None:
        order.wait(self, getattr(event, "point", None))

    with ExitStack() as stack:
        for owner, name, function in (
            (torch.cpu.Event, "record", record),
            (torch.cpu.Stream, "record_event", record_event),
            (torch.cpu.Stream, "wait_event", wait_event),
            (torch.cpu.Stream, "wait_stream", lambda self, other: order.wait(self, order.point(other))),
        ):
            stack.enter_context(replaced(owner, name, function))
        yield
