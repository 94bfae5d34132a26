"""``bench streams`` on a CPU, whose streams do nothing: what is compared, and that wrong results are not timed."""

import math

import pytest
import torch

from trainfit.bench.experiment import Bench
from trainfit.bench.experiments import streams
from trainfit.bench.run import RULES, run
from trainfit.bench.stopwatch import stopwatch_of


def streams_bench() -> Bench:
    return Bench(
        torch.device("cpu"), "tiny", stopwatch_of(torch.device("cpu")), None, RULES["tiny"], math.inf
    )


def test_two_streams_are_compared_with_one() -> None:
    rows = {
        (row.point["case"], row.point["streams"]): row
        for row in run("streams", form="tiny").rows
        if "case" in row.point
    }
    assert len(rows) == 2 * len(streams.cases(torch.device("cpu")))
    for (case, number), row in rows.items():
        if number == "two":
            alone = rows[case, "one"]
            assert alone.times is not None
            assert row.times is not None
            assert row.numbers["gain"] == pytest.approx(alone.times.median / row.times.median)
            assert 1 <= float(row.numbers["at_most"]) <= 2.5


def test_streams_that_leave_different_results_are_not_timed() -> None:
    out, calls = torch.zeros(4), []

    def different() -> None:
        calls.append(1)
        out.fill_(len(calls))

    case = streams.Case(different, lambda: None, (out,))
    rows = list(streams._both(streams_bench(), "a case", lambda bench: case))
    assert [(row.status, row.times) for row in rows] == [("failed", None)] * 2
    assert "different results" in rows[0].message
