"""Two steady steps on three timelines: the host, the GPU's computation, its communication. No torch here.

The host issues operations one after another, at most ``Host.queue`` launches ahead of the GPU; the GPU waits
for the host, and the host for the GPU where it reads a value. Collectives of a group follow one another, each
begins when the operations that it needs are done, and the computation waits where the code waits: FSDP2 at a
block's first use, for reductions at the end of the backward, elsewhere at once. While both run, each slows
the other down. Copies to and from the host overlap the phase that issues them.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from trainfit.catalog.constants import constants
from trainfit.ledger.ledger import Collective, Ledger, Op
from trainfit.virtual.cuda.op_kinds import COPY_DIRECTIONS

STEPS = 2
"""Steps replayed: the first one fills the queue."""
NEVER = float("inf")
LEAST_S = 1e-12
"""What is shorter is an error of rounding."""


@dataclass(frozen=True)
class Host:
    """The host: seconds to issue an operation or a collective, after a read, and until an idle GPU starts."""

    issue_s: Callable[[Op], float] = lambda op: 0.0
    read_s: float = 0.0
    launch_s: float = 0.0
    collective_s: Callable[[Collective], float] = lambda one: 0.0
    loop_s: Callable[[Op], float] = lambda op: 0.0
    """Seconds to issue an operation's launches after the first; before these the host reads a value."""
    queue: int = field(default_factory=lambda: constants().host.queue)
    """Launches that CUDA queues before the host has to wait."""


class Overlap(NamedTuple):
    """Speeds, of those alone, while computation and collectives of a group run at the same time."""

    computation: float = 1.0
    collectives: float = 1.0

    def at(self, load: float) -> "Overlap":
        """Return the speeds during a collective that takes this share of what a fast one takes."""
        return Overlap(1 - load * (1 - self.computation), 1 - load * (1 - self.collectives))


@dataclass
class Times:
    """Seconds of one steady step."""

    step_s: float = 0.0
    idle_s: float = 0.0
    """The computation waits for the host."""
    issue_s: float = 0.0
    """The host's own work."""
    copies_s: float = 0.0
    """The computation waits for copies to or from the host."""
    exposed_s: dict[int, float] = field(default_factory=dict)
    """By segment: the computation waits for collectives."""
    slowed_s: dict[int, float] = field(default_factory=dict)
    """By segment: the computation takes longer, because collectives run meanwhile."""


class Span(NamedTuple):
    """An operation or a collective in a steady step; seconds since the step began."""

    index: int
    """In the ledger's operations or collectives."""
    began_s: float
    ended_s: float
    issued_s: float
    """When the host had issued it; negative: before the step, while the GPU was behind."""
    issue_s: float = 0.0
    """The host's work for it, up to then."""

    def moved(self, seconds: float) -> "Span":
        """Return the span so much later."""
        began, ended, issued = (at + seconds for at in (self.began_s, self.ended_s, self.issued_s))
        return self._replace(began_s=began, ended_s=ended, issued_s=issued)


class Spans(NamedTuple):
    """Every operation and collective of a steady step, in the order in which they run."""

    ops: list[Span]
    collectives: list[Span]
    step_s: float

    def from_first_issue(self) -> "Spans":
        """Return the spans on a clock that begins with the host's first work for the step."""
        ahead_s = max(0.0, *(one.issue_s - one.issued_s for one in self.ops)) if self.ops else 0.0
        ops, collectives = ([one.moved(ahead_s) for one in each] for each in (self.ops, self.collectives))
        return Spans(ops, collectives, self.step_s + ahead_s)


def replay(
    ledger: Ledger,
    op_s: Callable[[Op], float],
    collective_s: Callable[[Collective], float],
    *,
    copy_s: Callable[[Op], float] = lambda op: 0.0,
    host: Host | None = None,
    overlap: Overlap = Overlap(),  # noqa: B008
    load: Callable[[Collective], float] = lambda one: 1.0,
) -> Times:
    """Return the times of the steady step.

    Args:
        op_s: seconds of an operation on the GPU.
        collective_s: seconds of a collective alone.
        copy_s: seconds of a copy between the GPU and the host.
        host: None: it issues everything at once.
        overlap: speeds while computation and collectives overlap.
        load: share of that slowdown which a collective causes, and has itself.
    """
    return _Replay(ledger, op_s, collective_s, copy_s, host or Host(), overlap, load).run()


def spans(
    ledger: Ledger,
    op_s: Callable[[Op], float],
    collective_s: Callable[[Collective], float],
    *,
    copy_s: Callable[[Op], float],
    host: Host,
    overlap: Overlap,
    load: Callable[[Collective], float],
) -> Spans:
    """Return when each operation and collective runs; arguments as ``replay`` takes them."""
    replayed = _Replay(ledger, op_s, collective_s, copy_s, host, overlap, load)
    replayed.run()
    return replayed.spans()


class _Flight:
    """An issued collective: when the host issued it, the operation that it needs, and what is left of it."""

    __slots__ = ("began_at", "ended_at", "index", "issued_at", "left_s", "needs", "segment", "speeds")

    def __init__(
        self, index: int, issued_at: float, needs: int, left_s: float, segment: int, speeds: Overlap
    ):
        self.index = index
        self.issued_at, self.needs, self.left_s, self.segment = issued_at, needs, left_s, segment
        self.speeds = speeds
        self.began_at: float | None = None
        self.ended_at = 0.0


class _Replay:
    def __init__(
        self,
        ledger: Ledger,
        op_s: Callable[[Op], float],
        collective_s: Callable[[Collective], float],
        copy_s: Callable[[Op], float],
        host: Host,
        overlap: Overlap,
        load: Callable[[Collective], float],
    ):
        copied = all(one.kind.by_copy_engines for one in ledger.collectives)  # Copy engines slow nothing.
        self.ledger, self.host, self.load = ledger, host, load
        self.overlap = Overlap() if copied else overlap
        self.order = list(_order(ledger))
        self.num_ops = len(self.order)
        self.ops = {i: ledger.ops[i] for i in set(self.order)}
        segments = [self.ops[i].segment for i in self.order]
        self.ends = {at for at, (one, after) in enumerate(pairwise([*segments, -1])) if one != after}
        """Positions at which a segment ends."""
        self.copy_s = {i: copy_s(op) for i, op in self.ops.items() if op.name in COPY_DIRECTIONS}
        self.op_s = {i: 0.0 if i in self.copy_s else op_s(op) for i, op in self.ops.items()}
        self.issue_s = {i: host.issue_s(op) for i, op in self.ops.items()}
        self.loop_s = {i: loop_s for i, op in self.ops.items() if (loop_s := host.loop_s(op))}
        self.collective_s = [collective_s(one) for one in ledger.collectives]
        self.issued: dict[int, list[int]] = {}
        self.waited: dict[int, list[int]] = {}
        for index, one in enumerate(ledger.collectives):
            self.issued.setdefault(one.op, []).append(index)
            self.waited.setdefault(one.waited_at, []).append(index)
        self.communicating = {*self.issued, *self.waited}
        """Operations after which collectives are issued or waited for."""
        self.begun_after = {one.begins_after for one in ledger.collectives}
        """Operations that collectives begin after."""

        self.times = Times()
        self.now = self.host_now = self.segment_began = 0.0
        self.copies: dict[str, float] = {}
        """Direction -> seconds of the segment's copies."""
        self.next = 0
        """Position that the host issues next."""
        self.launched_at: list[float] = []
        """By position: when the host had issued it."""
        self.began_at: list[float] = []
        """By position: when the GPU began it."""
        self.ended_at: list[float] = []
        """By position: when the GPU had done it."""
        self.last_of: dict[int, int] = {}
        """Operation that a collective begins after -> position where the host issued it last."""
        self.pending: dict[int, _Flight] = {}
        """Collective -> the one issued last, until its wait is issued."""
        self.waits: dict[int, list[_Flight]] = {}
        """Position -> what the computation waits for after it."""
        self.flights: dict[tuple[int, int], deque[_Flight]] = {}
        """Group of ranks -> its collectives that are not done, in their order."""
        self.flown: list[_Flight] = []
        """All that were issued."""

    def run(self) -> Times:
        began = 0.0
        for step in range(STEPS):
            began, self.times = self.now, Times()
            for position in range(step * self.num_ops, (step + 1) * self.num_ops):
                self._compute(position)
            self.times.step_s = self.now - began
        self.times.issue_s = sum(self.issue_s[i] + self.loop_s.get(i, 0.0) for i in self.order) + sum(
            self.host.collective_s(self.ledger.collectives[each]) * self.ledger.times(one)
            for each, one in enumerate(self.ledger.collectives)
            if one.op in self.ops
        )
        return self.times

    def spans(self) -> Spans:
        """Return the spans of the last step, after ``run``."""
        first = (STEPS - 1) * self.num_ops
        began = self.ended_at[first - 1] if self.num_ops else 0.0
        ops = [
            Span(
                index,
                self.began_at[at] - began,
                self.ended_at[at] - began,
                self.launched_at[at] - began,
                self.issue_s[index],
            )
            for at, index in enumerate(self.order, first)
        ]
        collectives = [
            Span(one.index, one.began_at - began, one.ended_at - began, one.issued_at - began)
            for one in self.flown
            if one.began_at is not None and one.ended_at > began
        ]
        return Spans(ops, collectives, self.now - began)

    # The host

    def _issue_ahead(self, position: int, until: float) -> None:
        """Let the host issue what it can by a time, while the GPU is at a position."""
        queue = self.host.queue
        most = position + queue if position + queue < STEPS * self.num_ops else STEPS * self.num_ops
        while self.next < most and (self.next <= position or self.host_now <= until):
            index = self.order[self.next % self.num_ops]
            if reads := self.ops[index].host[-1] + (index in self.loop_s):
                if self.next > position:
                    return  # It waits until the GPU has come here.
                self.host_now = max(self.host_now, self.now) + reads * self.host.read_s
            if self.next >= queue and self.host_now < self.ended_at[self.next - queue]:
                self.host_now = self.ended_at[self.next - queue]
            self.host_now += self.issue_s[index]
            self.launched_at.append(self.host_now)
            self.host_now += self.loop_s.get(index, 0.0)
            if index in self.begun_after:
                self.last_of[index] = self.next
            if index in self.communicating or (self.pending and self.next % self.num_ops in self.ends):
                self._issue(self.next, index)
            self.next += 1

    def _issue(self, position: int, index: int) -> None:
        """Issue the collectives after an operation, and what the computation waits for after it."""
        waits = list[_Flight]()
        for each in self.issued.get(index, ()):
            one = self.ledger.collectives[each]
            self.host_now += self.host.collective_s(one)
            needs, speeds = self._needs(one, position), self.overlap.at(self.load(one))
            flight = _Flight(each, self.host_now, needs, self.collective_s[each], one.segment, speeds)
            self.flown.append(flight)
            self.flights.setdefault((one.num_ranks, one.span), deque()).append(flight)
            in_backward = self.ledger.segments[one.segment].phase == "backward"
            if one.is_synchronous or (one.begins_after < 0 and not in_backward):
                waits.append(flight)
            else:
                self.pending[each] = flight
        waits += [self.pending.pop(each) for each in self.waited.get(index, ()) if each in self.pending]
        if self.pending and position % self.num_ops in self.ends:
            at_end = [each for each in self.pending if self.ledger.collectives[each].waited_at < 0]
            waits += map(self.pending.pop, at_end)
        if waits:
            self.waits[position] = waits

    def _needs(self, one: Collective, position: int) -> int:
        """Return the position that must be done before a collective begins."""
        if one.begins_after < 0:
            return position
        # An operation of the previous step has run: the collective may begin at the start of this step.
        return self.last_of.get(one.begins_after, position // self.num_ops * self.num_ops - 1)

    # The GPU

    def _compute(self, position: int) -> None:
        """Compute the operation at a position, when the host has issued it."""
        index = self.order[position % self.num_ops]
        op = self.ops[index]
        if self.next <= position:
            self._issue_ahead(position, self.now)
        start = self.launched_at[position] + self.host.launch_s
        if start > self.now and op.calls:
            if self.issued:
                self._issue_ahead(position, start)
            self.times.idle_s += start - self.now
            self._pass(start)
        self.began_at.append(self.now)
        work_s = self.op_s[index]
        # Without collectives what the host issues meanwhile makes no difference.
        if self.issued and self.host_now <= self.now + work_s:
            self._issue_ahead(position, self.now + work_s)
        if self.flights:
            self._work(work_s, op.segment)
        else:
            self.now += work_s
        if index in self.loop_s and (start := self.launched_at[position] + self.loop_s[index]) > self.now:
            self.times.idle_s += start - self.now
            self._pass(start)
        self.ended_at.append(self.now)
        if index in self.copy_s:
            way = COPY_DIRECTIONS[op.name]
            self.copies[way] = self.copies.get(way, 0.0) + self.copy_s[index]
        if position in self.waits:
            for flight in self.waits.pop(position):
                self._wait(flight, op.segment)
        if position % self.num_ops in self.ends:
            self._end_copies()

    def _end_copies(self) -> None:
        excess_s = max(self.copies.values(), default=0.0) - (self.now - self.segment_began)
        if excess_s > 0:
            self.times.copies_s += excess_s
            self._pass(self.now + excess_s)
        self.copies = {}
        self.segment_began = self.now

    def _wait(self, flight: _Flight, segment: int) -> None:
        """Wait for a collective; until the host has issued it, the wait is for the host."""
        began = self.now
        while flight.left_s > 0:
            self._advance(NEVER, computes=False)
        idle_s = max(0.0, min(flight.issued_at, self.now) - began)
        self.times.idle_s += idle_s
        exposed_s = self.now - began - idle_s
        if exposed_s > 0:
            self.times.exposed_s[segment] = self.times.exposed_s.get(segment, 0.0) + exposed_s

    def _work(self, work_s: float, segment: int) -> None:
        """Compute for so many seconds of an operation alone."""
        began, left_s = self.now, work_s
        while left_s > LEAST_S:
            left_s -= self._advance(left_s, computes=True)
        slowed_s = self.now - began - work_s
        if slowed_s > LEAST_S:
            self.times.slowed_s[segment] = self.times.slowed_s.get(segment, 0.0) + slowed_s

    def _pass(self, until: float) -> None:
        """Let time pass without computation."""
        while self.flights and self.now < until - LEAST_S:
            self._advance(until - self.now, computes=False)
        self.now = max(self.now, until)

    def _advance(self, limit_s: float, *, computes: bool) -> float:
        """Let time pass until a collective begins or ends, or the limit; return the seconds of the limit.

        An example: the computation has 10 s of an operation to do. The host issues a collective, of 3 s
        alone, at 2 s. While both run, the computation has 0.8 of its speed and the collective 0.6. ``_work``
        calls this three times::

            now  limit_s  what ends it                passed_s               returns
              0     10    the collective begins       2                      2
              2      8    it ends                     5 = 3 / 0.6            4 = 5 * 0.8
              7      4    the limit                   4                      4

        At 11 s the operation is done: 1 s of it is ``slowed_s``. With ``computes=False``, where the
        computation only waits, the collective runs at its full speed, and ``limit_s`` is time itself.
        """
        if not self.flights:
            self.now += limit_s
            return limit_s
        running = list[tuple[tuple[int, int], _Flight]]()
        next_s, speed, done = NEVER, 1.0, len(self.ended_at)
        for group, queue in self.flights.items():
            first = queue[0]
            if first.needs >= done:
                continue
            if first.issued_at > self.now + LEAST_S:
                next_s = min(next_s, first.issued_at - self.now)
                continue
            running.append((group, first))
            if computes:
                speed = min(speed, first.speeds.computation)
        passed_s = min(limit_s / speed, next_s)
        for _, one in running:
            passed_s = min(passed_s, one.left_s / one.speeds.collectives if computes else one.left_s)
        self.now += passed_s
        for group, one in running:
            if one.began_at is None:
                one.began_at = self.now - passed_s
            one.left_s -= passed_s * one.speeds.collectives if computes else passed_s
            if one.left_s <= LEAST_S:
                one.left_s, one.ended_at = 0.0, self.now
                self.flights[group].popleft()
                if not self.flights[group]:
                    del self.flights[group]
        return passed_s * speed


def _order(ledger: Ledger) -> Iterator[int]:
    """Yield indices of the steady step's operations, the middle group's as often as it runs."""
    run = list[int]()
    for index, op in enumerate(ledger.ops):
        segment = ledger.segments[op.segment]
        if segment.step != "steady" or segment.phase == "data":
            continue
        if run and (op.group, op.segment) != (ledger.ops[run[0]].group, ledger.ops[run[0]].segment):
            yield from run * ledger.times(ledger.ops[run[0]])
            run = []
        run.append(index)
    if run:
        yield from run * ledger.times(ledger.ops[run[0]])
