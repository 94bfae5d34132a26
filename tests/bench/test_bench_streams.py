"""``bench streams`` on a CPU, which has one stream: what is compared; wrong results are not timed."""

import math

import pytest
import torch

from trainfit.bench.experiments import streams
from trainfit.bench.harness.bench import Bench
from trainfit.bench.harness.runner import RULES, run
from trainfit.bench.harness.stopwatch import stopwatch_of
from trainfit.report.bench_plot import plot_of
from trainfit.spec.errors import InputError


def streams_bench() -> Bench:
    return Bench(
        torch.device("cpu"), "tiny", stopwatch_of(torch.device("cpu")), None, RULES["tiny"], math.inf
    )


def test_a_cpu_has_no_row_of_two_streams() -> None:
    rows = [row for row in run("streams", device="cpu", form="tiny").rows if "case" in row.point]
    assert [row.point["case"] for row in rows] == list(streams.cases(torch.device("cpu")))
    for row in rows:
        assert row.times is not None
        assert (row.point["streams"], row.numbers) == ("one", {})
    with pytest.raises(InputError, match="use one"):
        run("streams", device="cpu", form="tiny", only={"streams": ["two"]})


def test_two_streams_are_compared_with_one() -> None:
    """On a CPU, whose two streams are one: how the numbers are made."""
    bench = streams_bench()
    made = list(streams.cases(torch.device("cpu")).items())[:2]
    found = [row for name, make in made for row in streams._both(bench, name, make)]
    rows = {(row.point["case"], row.point["streams"]): row for row in found}
    assert len(rows) == 2 * len(made)
    for (case, number), row in rows.items():
        if number == "two":
            alone = rows[case, "one"]
            assert alone.times is not None
            assert row.times is not None
            assert row.numbers["gain"] == pytest.approx(alone.times.median / row.times.median)
            assert 1 <= float(row.numbers["at_most"]) <= 2.5
    result = run("streams", device="cpu", limit_s=0).model_copy(update={"rows": tuple(found)})
    drawn = plot_of(result, streams.EXPERIMENT.plots)
    assert drawn is not None


def test_streams_that_leave_different_results_are_not_timed() -> None:
    out, calls = torch.zeros(4), []

    def different() -> None:
        calls.append(1)
        out.fill_(len(calls))

    case = streams.Case(different, lambda: None, (out,))
    rows = list(streams._both(streams_bench(), "a case", lambda bench: case))
    assert [(row.status, row.times) for row in rows] == [("failed", None)] * 2
    assert "different results" in rows[0].message
    rows = list(streams._alone(streams_bench(), "a case", lambda bench: case))
    assert [row.status for row in rows] == ["failed"]
