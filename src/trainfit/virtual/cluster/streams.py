"""When a collective of FSDP2 may begin and where the computation waits for it, from its streams and events.

On a CPU PyTorch's streams and events are classes that do nothing; here they record what they order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from trainfit.virtual.trace.exclusive import replaced
from trainfit.virtual.trace.tracer import Tracer


class Point(NamedTuple):
    """A point of a stream."""

    op: int
    """Index of the last operation of the computation that is done by then."""
    collective: int
    """Index of the last collective that is done by then; -1: none."""


class Order:
    """What each stream has waited for. The first stream computes."""

    def __init__(self, tracer: Tracer):
        self._tracer, self._ledger = tracer, tracer.ledger
        self._computes = torch.cpu.current_stream()
        self._points: dict[Any, Point] = {}
        self._host_waited_for = -1
        """Index of the last operation that the host waited for before it went on issuing."""

    def host_waits(self) -> None:
        """Let the host wait for the computation, as to read a value: nothing that it issues begins before."""
        self._tracer.count_read()
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

    def issued(self, collective: int) -> None:
        """Record that the current stream issued a collective."""
        stream = torch.cpu.current_stream()
        if stream is not self._computes:
            after = max(self.point(stream).op, self._host_waited_for)
            self._points[stream] = Point(after, collective)
            one = self._ledger.collectives[collective]
            self._ledger.collectives[collective] = one._replace(begins_after=after)


@contextmanager
def ordered_collectives(tracer: Tracer) -> Iterator[Order]:
    """Record with each collective on a stream of its own when it may begin and is waited for."""
    order, collective = Order(tracer), tracer.on_collective

    def recorded(func: Any, args: Any) -> None:
        before = len(tracer.ledger.collectives)
        collective(func, args)
        if len(tracer.ledger.collectives) > before:
            order.issued(before)

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
            (tracer, "on_collective", recorded),
        ):
            stack.enter_context(replaced(owner, name, function))
        yield order
