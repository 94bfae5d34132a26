"""What is kept where the driver held the clocks down: bytes, and no time, no rate and no clock."""

from collections.abc import Mapping
from typing import Any, cast

import pytest
import torch
from pydantic import ValidationError

from trainfit.bench.harness.bench import Bench, Part, of_work
from trainfit.bench.harness.stopwatch import CpuStopwatch, CudaStopwatch
from trainfit.bench.harness.timing import Rule, take
from trainfit.bench.workloads.attention import Case
from trainfit.bench.workloads.attention import rows as attention_rows
from trainfit.measurement.environment import host_environment
from trainfit.spec.bench import BenchRow

CPU = torch.device("cpu")
CAP = ("software power cap",)


class Held(CpuStopwatch):
    """A CPU whose clocks are held down in the first ``times`` samples."""

    def __init__(self, times: int):
        super().__init__()
        self.left = times

    def throttled(self) -> tuple[str, ...]:
        self.left -= 1
        return CAP if self.left >= 0 else ()

    def rest(self, seconds: float) -> None:
        pass


def bench_of(times: int) -> Bench:
    return Bench(CPU, "tiny", Held(times), None, Rule(warmup=0, min_samples=6, max_samples=6), float("inf"))


def test_a_throttled_row_keeps_its_bytes_and_nothing_else() -> None:
    held: dict[str, Any] = {}

    def build() -> Any:
        held["before_backward_bytes"] = 384
        return lambda lap: None

    part = Part({"seq": 1}, rates=of_work(1e9), held=held)
    (row,) = bench_of(99).time([part], build)
    assert (row.status, row.times, row.numbers) == ("throttled", None, {"before_backward_bytes": 384})
    (row,) = bench_of(0).time([part], build)
    assert row.times is not None
    assert set(row.numbers) == {"tflops_per_s", "before_backward_bytes"}


def test_attention_tells_the_bytes_before_backward_of_a_throttled_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "trainfit.bench.workloads.attention.before_backward", lambda *a: {"before_backward_bytes": 7}
    )
    bench = bench_of(99)
    rows = {
        row.point["pass"]: row
        for row in attention_rows(bench, Case("ours", "fp32", 1, 1, 8, 16, True), bench.rule)
    }
    assert {row.status for row in rows.values()} == {"throttled"}
    assert {which: row.numbers for which, row in rows.items()} == {
        "forward": {"before_backward_bytes": 7}, "backward": {}, "both": {},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("status", "numbers"),
    [
        ("throttled", {"tflops_per_s": 1.0}),
        ("throttled", {"a_bytes": 1, "host_s": 1.0}),
        ("failed", {"a_bytes": 1}),
    ],
)
def test_a_rate_or_a_time_of_a_throttled_row_is_refused(status: Any, numbers: Mapping[str, Any]) -> None:
    with pytest.raises(ValidationError, match="has no numbers"):
        BenchRow(point={}, status=status, message="why", numbers=dict(numbers))


class Nvml:
    """Says clocks and reasons in turn, one pair for each time that one asks."""

    def __init__(self, states: list[tuple[int, tuple[str, ...]]]):
        self.states, self.at = states, -1

    def clocks_mhz(self) -> dict[str, int]:
        self.at += 1
        return {"sm": self.states[self.at][0], "sm_max": 1980}

    def throttled(self) -> tuple[str, ...]:
        return self.states[self.at][1]

    def driver(self) -> None:
        return None


class Events:
    """An event that the device has come to after ``times`` more questions."""

    def __init__(self, times: int):
        self.left = times

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0


def cuda_stopwatch(states: list[tuple[int, tuple[str, ...]]]) -> CudaStopwatch:
    watch = object.__new__(CudaStopwatch)
    watch._nvml, watch._clocks, watch._seen = cast(Any, Nvml(states)), {}, {}
    return watch


def test_the_clocks_of_a_sample_that_was_discarded_do_not_count() -> None:
    watch = cuda_stopwatch([(1980, ()), (1320, CAP), (1905, ()), (1500, CAP)])
    for _ in range(4):
        if not watch.held_until(Events(0)):
            watch.kept()
    assert watch._clocks == {"sm": 1905, "sm_max": 1980}


def test_the_lowest_clock_of_a_long_sample_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainfit.bench.harness.stopwatch.POLL_S", -1.0)
    watch = cuda_stopwatch([(1980, ()), (1800, ()), (1900, ())])
    assert watch.held_until(Events(2)) == ()
    watch.kept()
    assert watch._clocks["sm"] == 1800


def test_the_harness_says_which_samples_count() -> None:
    class Told(Held):
        counted = 0

        def kept(self) -> None:
            self.counted += 1

    watch = Told(2)
    timing = take(lambda lap: None, watch, Rule(warmup=0, min_samples=6, max_samples=6))
    assert (watch.counted, timing.discarded) == (6, 2)
    assert watch.environment(host_environment("cpu")).clocks_mhz == {}
