"""Communication that the computation hides and that it waits for: a replay of both. No torch here.

The steady step's operations run one after another on the GPU, and so do the collectives of a group meanwhile.
Each begins when the operations that it needs are done. The computation waits where the code waits: FSDP2 at a
block's first use, for reductions at the end of the backward, elsewhere at once.
"""

from collections.abc import Callable, Iterator

from trainfit.ledger.ledger import Collective, Ledger, Op


def overlap(
    ledger: Ledger, op_s: Callable[[Op], float], collective_s: Callable[[Collective], float]
) -> dict[int, float]:
    """Return, for each segment of the steady step, the seconds that the computation waits for collectives.

    Args:
        op_s: seconds of an operation on the GPU.
        collective_s: seconds of a collective alone.
    """
    return _Replay(ledger, op_s, collective_s).run()


class _Replay:
    def __init__(
        self, ledger: Ledger, op_s: Callable[[Op], float], collective_s: Callable[[Collective], float]
    ):
        self.ledger, self.op_s, self.collective_s = ledger, op_s, collective_s
        self.now = 0.0
        self.exposed_s: dict[int, float] = {}
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

    def run(self) -> dict[int, float]:
        segment = -1
        for index in self._order():
            op = self.ledger.ops[index]
            if op.segment != segment:
                self._wait_for_all(segment)
                segment = op.segment
            self.now += self.op_s(op)
            self.done_at[index] = self.now
            for collective in self.issued.get(index, ()):
                self._issue(collective)
            for collective in self.waited.get(index, ()):
                self._wait(collective, segment)
        self._wait_for_all(segment)
        return self.exposed_s

    def _order(self) -> Iterator[int]:
        """Yield indices of the steady step's operations, the middle group's as often as it runs."""
        ledger, run = self.ledger, list[int]()
        for index, op in enumerate(ledger.ops):
            if ledger.segments[op.segment].step != "steady":
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
        end = max(after, self.free_at.get(group, 0.0)) + seconds
        self.free_at[group] = self.ends[index] = end
        in_backward = self.ledger.segments[one.segment].phase == "backward"
        if one.is_synchronous or (one.begins_after < 0 and not in_backward):
            self._wait(index, one.segment)

    def _wait(self, index: int, segment: int) -> None:
        end = self.ends.pop(index, 0.0)
        if end > self.now:
            self.exposed_s[segment] = self.exposed_s.get(segment, 0.0) + end - self.now
            self.now = end

    def _wait_for_all(self, segment: int) -> None:
        """Wait at the end of a segment for what nothing else waits for."""
        for index in [each for each in self.ends if self.ledger.collectives[each].waited_at < 0]:
            self._wait(index, segment)
