"""``bench streams`` on a CPU, which has one stream: what is compared; wrong results are not timed."""

from collections.abc import Callable

import pytest
import torch

from bench_rows import CPU, result_of, tiny_bench
from trainfit.bench.experiments import streams
from trainfit.bench.harness.runner import run
from trainfit.bench.harness.stopwatch import Stopwatch
from trainfit.bench.harness.timing import Lap
from trainfit.report.bench_plot import plot_of
from trainfit.spec.bench import Environment
from trainfit.spec.errors import InputError


def test_a_cpu_has_no_row_of_two_streams() -> None:
    rows = [row for row in run("streams", device="cpu", form="tiny").rows if "case" in row.point]
    assert [row.point["case"] for row in rows] == list(streams.cases(CPU))
    for row in rows:
        assert row.times is not None
        assert (row.point["streams"], row.numbers) == ("one", {})
    with pytest.raises(InputError, match="use one"):
        run("streams", device="cpu", form="tiny", only={"streams": ["two"]})


class ScriptedClock(Stopwatch):
    """A device on which time passes as the test says."""

    flush_bytes = 0

    def __init__(self) -> None:
        self.now = 0.0

    def flush(self) -> None:
        raise AssertionError("streams are timed without a flush")

    def mark(self) -> float:
        return self.now

    def between(self, start: float, end: float) -> float:
        return end - start

    def wait(self) -> None:
        pass

    def throttled(self) -> tuple[str, ...]:
        return ()

    def environment(self, host: Environment) -> Environment:
        return host


def test_two_streams_are_compared_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of 3 s and one of 1 s: 4 s one after the other, 3.2 s in two streams, 3 s at best."""
    clock, out = ScriptedClock(), torch.zeros(4)

    def passes(seconds: float) -> Callable[[], None]:
        def do() -> None:
            clock.now += seconds
            out.fill_(1.0)

        return do

    def overlapped(case: streams.Case, device: torch.device) -> Callable[[Lap], object]:
        return lambda lap: passes(3.2)()

    monkeypatch.setattr(streams, "two_streams", overlapped)
    case = streams.Case(passes(3.0), passes(1.0), (out,))
    bench = tiny_bench(clock)
    alone, both = streams.timed(bench, "a case", lambda bench: case, in_two=True)
    assert alone.times is not None
    assert both.times is not None
    assert alone.times.median == pytest.approx(4.0)
    assert both.times.median == pytest.approx(3.2)
    assert both.numbers["gain"] == pytest.approx(4.0 / 3.2)
    assert both.numbers["at_most"] == pytest.approx(4.0 / 3.0)
    assert plot_of(result_of(alone, both, experiment="streams"), streams.EXPERIMENT.plots) is not None


def test_streams_that_leave_different_results_are_not_timed() -> None:
    out, calls = torch.zeros(4), []

    def different() -> None:
        calls.append(1)
        out.fill_(len(calls))

    case = streams.Case(different, lambda: None, (out,))
    for in_two in (False, True):
        rows = list(streams.timed(tiny_bench(), "a case", lambda bench: case, in_two=in_two))
        assert [(row.status, row.times) for row in rows] == [("failed", None)] * (1 + in_two)
        assert "different results" in rows[0].message
