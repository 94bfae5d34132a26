"""``bench transformer``: which steps count for each number of warm-up steps, where some throttled."""

import pytest
import torch

from trainfit.bench.experiments import transformer
from trainfit.bench.harness.bench import Bench
from trainfit.bench.harness.stopwatch import CpuStopwatch
from trainfit.bench.harness.timing import Timing
from trainfit.spec.bench import BenchRow
from trainfit.spec.result import PHASES


class Held(CpuStopwatch):
    """A CPU whose clocks are held down in these steps."""

    def __init__(self, steps: set[int]):
        super().__init__()
        self.steps, self.at = steps, -1

    def throttled(self) -> tuple[str, ...]:
        self.at += 1
        return ("software power cap",) if self.at in self.steps else ()

    def rest(self, seconds: float) -> None:
        pass


def rows_of(steps: set[int]) -> dict[int, BenchRow]:
    """Rows by number of warm-up steps, where the clocks were held in ``steps``."""
    bench = Bench(torch.device("cpu"), "tiny", Held(steps), None, transformer.SERIES, float("inf"))
    bench.only = {"precision": frozenset({"bf16"})}
    return {int(row.point["warm-up"]): row for row in transformer.run(bench)}


def test_without_the_first_step_there_is_no_number_without_warm_up() -> None:
    rows = rows_of({0, 1})
    assert (rows[0].status, rows[0].times, rows[0].numbers) == ("throttled", None, {})
    assert "software power cap" in rows[0].message
    assert "first step" in rows[0].message
    assert {w: row.numbers["steps_before"] for w, row in rows.items() if w} == {1: 2, 2: 2, 5: 5}
    assert {w: row.discarded for w, row in rows.items() if w} == {1: 1, 2: 0, 5: 0}
    assert rows[1].times == rows[2].times


def test_steps_that_do_not_count_are_discarded_and_the_next_ones_count() -> None:
    rows = rows_of({3, 7})
    assert {w: row.numbers["steps_before"] for w, row in rows.items()} == {0: 0, 1: 1, 2: 2, 5: 5}
    assert {w: row.discarded for w, row in rows.items()} == {0: 2, 1: 2, 2: 2, 5: 1}
    for row in rows.values():
        assert row.times is not None
        assert len(row.times.samples) == transformer.NUM_TIMED
    assert set(transformer.moments(Timing(laps={name: [1.0, 2.0] for name in (*PHASES, "total")}))) <= set(
        rows[0].numbers
    )


@pytest.mark.parametrize("first", [1, 2, 5])
def test_a_later_step_that_was_lost_leaves_the_first_ones_number(first: int) -> None:
    assert rows_of({first})[0].times is not None
