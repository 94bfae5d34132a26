"""One steady step on three timelines: the host, the GPU's computation, its communication. No torch here.

The host issues operations one after another, at most ``QUEUE`` launches ahead of the GPU; the GPU waits for
the host, and the host for the GPU where it reads a value. Collectives of a group follow one another, each
begins when the operations that it needs are done, and the computation waits where the code waits: FSDP2 at a
block's first use, for reductions at the end of the backward, elsewhere at once. Copies to and from the host
overlap the phase that issues them.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from trainfit.ledger.ledger import Collective, Ledger, Op
from trainfit.virtual.cuda.op_kinds import COPY_DIRECTIONS

QUEUE = 1000
"""Launches that CUDA queues before the host has to wait."""
STEPS = 2
"""Steps replayed with a host: the first one fills the queue."""


@dataclass(frozen=True)
class Host:
    """The host's work: seconds to issue an operation, after a read, and until an idle GPU starts."""

    issue_s: Callable[[Op], float]
    read_s: float
    launch_s: float


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


def replay(
    ledger: Ledger,
    op_s: Callable[[Op], float],
    collective_s: Callable[[Collective], float],
    *,
    copy_s: Callable[[Op], float] = lambda op: 0.0,
    host: Host | None = None,
) -> Times:
    """Return the times of the steady step.

    Args:
        op_s: seconds of an operation on the GPU.
        collective_s: seconds of a collective alone.
        copy_s: seconds of a copy between the GPU and the host.
        host: None: it issues everything at once.
    """
    return _Replay(ledger, op_s, collective_s, copy_s, host).run()


class _Replay:
    def __init__(
        self,
        ledger: Ledger,
        op_s: Callable[[Op], float],
        collective_s: Callable[[Collective], float],
        copy_s: Callable[[Op], float],
        host: Host | None,
    ):
        self.ledger, self.collective_s, self.host = ledger, collective_s, host
        self.now = self.host_now = self.segment_began = 0.0
        self.times = Times()
        self.order = list(self._order())
        used = set(self.order)
        self.copies: dict[str, float] = {}
        """Direction -> seconds of the segment's copies."""
        self.copy_s = {i: copy_s(ledger.ops[i]) for i in used if ledger.ops[i].name in COPY_DIRECTIONS}
        self.op_s = {i: 0.0 if i in self.copy_s else op_s(ledger.ops[i]) for i in used}
        self.issue_s = {i: host.issue_s(ledger.ops[i]) for i in used} if host else {}
        self.queue = deque[float](maxlen=QUEUE)
        self.done_at: dict[int, float] = {}
        """Operation -> when it was done last."""
        self.ends: dict[int, float] = {}
        """Collective -> when it ends, until the computation waited for it."""
        self.free_at: dict[tuple[int, int], float] = {}
        """Group of ranks -> when its last collective ends."""
        self.issued: dict[int, list[int]] = {}
        self.waited: dict[int, list[int]] = {}
        for index, one in enumerate(ledger.collectives):
            self.issued.setdefault(one.op, []).append(index)
            self.waited.setdefault(one.waited_at, []).append(index)

    def run(self) -> Times:
        for _ in range(STEPS if self.host else 1):
            began, self.times = self.now, Times()
            self._step()
            self.times.step_s = self.now - began
        return self.times

    def _step(self) -> None:
        segment = -1
        self.segment_began = self.now
        for index in self.order:
            op = self.ledger.ops[index]
            if op.segment != segment:
                self._end(segment)
                segment = op.segment
            if self.host is not None:
                self._issue_op(index, op, self.host)
            self.now += self.op_s[index]
            self.queue.append(self.now)
            if index in self.copy_s:
                way = COPY_DIRECTIONS[op.name]
                self.copies[way] = self.copies.get(way, 0.0) + self.copy_s[index]
            if self.issued or self.waited:
                self.done_at[index] = self.now
                for collective in self.issued.get(index, ()):
                    self._issue(collective)
                for collective in self.waited.get(index, ()):
                    self._wait(collective, segment)
        self._end(segment)

    def _issue_op(self, index: int, op: Op, host: Host) -> None:
        """Let the host issue an operation; the GPU waits for it if it has nothing else to do."""
        if reads := op.host[-1]:
            self.host_now = max(self.host_now, self.now) + reads * host.read_s
        issue_s = self.issue_s[index]
        self.times.issue_s += issue_s
        self.host_now += issue_s
        if len(self.queue) == QUEUE:
            self.host_now = max(self.host_now, self.queue[0])
        idle_s = self.host_now + host.launch_s - self.now
        if idle_s > 0 and op.calls:
            self.times.idle_s += idle_s
            self.now += idle_s

    def _end(self, segment: int) -> None:
        """End a segment: wait for its copies and for collectives that nothing else waits for."""
        excess_s = max(self.copies.values(), default=0.0) - (self.now - self.segment_began)
        if excess_s > 0:
            self.times.copies_s += excess_s
            self.now += excess_s
        self.copies = {}
        for index in [each for each in self.ends if self.ledger.collectives[each].waited_at < 0]:
            self._wait(index, segment)
        self.segment_began = self.now

    def _order(self) -> Iterator[int]:
        """Yield indices of the steady step's operations, the middle group's as often as it runs."""
        ledger, run = self.ledger, list[int]()
        for index, op in enumerate(ledger.ops):
            segment = ledger.segments[op.segment]
            if segment.step != "steady" or segment.phase == "data":
                continue
            if run and (op.group, op.segment) != (ledger.ops[run[0]].group, ledger.ops[run[0]].segment):
                yield from self._repeated(run)
                run = []
            run.append(index)
        yield from self._repeated(run)

    def _repeated(self, run: list[int]) -> Iterator[int]:
        times = self.ledger.times(self.ledger.ops[run[0]]) if run else 0
        yield from run * times

    def _issue(self, index: int) -> None:
        one = self.ledger.collectives[index]
        seconds = self.collective_s(one)
        group = one.num_ranks, one.span
        after = self.done_at.get(one.begins_after, 0.0) if one.begins_after >= 0 else self.now
        end = max(after, self.host_now, self.free_at.get(group, 0.0)) + seconds
        self.free_at[group] = self.ends[index] = end
        in_backward = self.ledger.segments[one.segment].phase == "backward"
        if one.is_synchronous or (one.begins_after < 0 and not in_backward):
            self._wait(index, one.segment)

    def _wait(self, index: int, segment: int) -> None:
        end = self.ends.pop(index, 0.0)
        if end > self.now:
            exposed = self.times.exposed_s
            exposed[segment] = exposed.get(segment, 0.0) + end - self.now
            self.now = end
