"""``bench streams`` on a CPU, which has one stream: what is compared; wrong results are not timed."""

import pytest
import torch

from bench_rows import CPU, result_of, tiny_bench
from trainfit.bench.experiments import streams
from trainfit.bench.harness.runner import run
from trainfit.report.bench_plot import plot_of
from trainfit.spec.errors import InputError


def test_a_cpu_has_no_row_of_two_streams() -> None:
    rows = [row for row in run("streams", device="cpu", form="tiny").rows if "case" in row.point]
    assert [row.point["case"] for row in rows] == list(streams.cases(CPU))
    for row in rows:
        assert row.times is not None
        assert (row.point["streams"], row.numbers) == ("one", {})
    with pytest.raises(InputError, match="use one"):
        run("streams", device="cpu", form="tiny", only={"streams": ["two"]})


def test_two_streams_are_compared_with_one() -> None:
    """On a CPU, whose two streams are one: how the numbers are made."""
    case, make = next(iter(streams.cases(CPU).items()))
    alone, both = streams.timed(tiny_bench(), case, make, in_two=True)
    assert alone.times is not None
    assert both.times is not None
    assert both.numbers["gain"] == pytest.approx(alone.times.median / both.times.median)
    assert 1 <= float(both.numbers["at_most"]) <= 4  # 2 at most, but for the noise of tiny times.
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
