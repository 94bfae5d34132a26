"""The timing harness: when sampling stops, which samples it discards, and what never gets a number."""

import math
from collections.abc import Callable
from itertools import count
from typing import Any, cast

import pytest

from bench_rows import CAP, Held
from trainfit.bench.harness.stopwatch import BUSY_S, CpuStopwatch, CudaStopwatch, Stopwatch
from trainfit.bench.harness.timing import (
    LONGEST_REST_S,
    PATIENCE,
    Lap,
    Rule,
    Timing,
    spread_of_median,
    steadied,
    take,
)
from trainfit.measurement.environment import host_environment
from trainfit.spec.bench import Environment, Spread


class ScriptedStopwatch(Stopwatch):
    """A device whose runs take scripted times; ``held``: samples in which its clocks are held down."""

    flush_bytes = 0

    def __init__(
        self,
        seconds: Callable[[int], float] = lambda sample: 1.0,
        held: Callable[[int], bool] = lambda sample: False,
        issue_s: Callable[[int], float] = lambda spin: 0.0,
    ):
        self.seconds, self.held, self.issue_s = seconds, held, issue_s
        self.now, self.samples, self.events, self.rests = 0.0, 0, [], []
        self.host, self.spins = 0.0, []

    def ran(self) -> None:
        self.host += self.issue_s(max(0, len(self.spins) - 1))
        self.now += self.seconds(self.samples)
        self.events.append("run")

    def flush(self) -> None:
        self.events.append("flush")

    def mark(self) -> float:
        return self.now

    def between(self, start: float, end: float) -> float:
        return end - start

    def wait(self) -> None:
        self.events.append("wait")

    def throttled(self) -> tuple[str, ...]:
        self.samples += 1
        return CAP if self.held(self.samples - 1) else ()

    def busy(self, seconds: float) -> None:
        self.spins.append(seconds)
        self.events.append("busy")

    def reached(self, mark: float) -> bool:
        """A spin shorter than the host's time to issue the work ends too early."""
        return self.spins[-1] < self.issue_s(len(self.spins) - 1)

    def host_now(self) -> float:
        return self.host

    def environment(self, host: Environment) -> Environment:
        return host

    def rest(self, seconds: float) -> None:
        self.rests.append(seconds)


def timed(watch: ScriptedStopwatch, rule: Rule, *, tick_s: float = 0.0) -> Timing:
    """Time the script by a wall clock that is ``tick_s`` later each time it is read."""
    ticks = count()
    return take(lambda lap: watch.ran(), watch, rule, clock=lambda: next(ticks) * tick_s)


def alternating(sample: int) -> float:
    return 1.0 + sample % 2


def test_sampling_ends_when_the_median_is_known() -> None:
    timing = timed(ScriptedStopwatch(), Rule(warmup=0, min_samples=10))
    assert (timing.status, timing.laps["total"]) == ("done", [1.0] * 10)
    noisy = ScriptedStopwatch(lambda sample: 1.0 + 0.03 * (sample * 7 % 11) / 11)
    timing = timed(noisy, Rule(warmup=0, min_samples=10, spread=0.02))
    assert timing.status == "done"
    assert 10 < len(timing.runs) < 200
    assert spread_of_median(timing.laps["total"]) <= 0.02 < spread_of_median(timing.laps["total"][:-1])


def test_sampling_ends_unsteady_at_the_most_samples_or_at_the_time_cap() -> None:
    timing = timed(ScriptedStopwatch(alternating), Rule(warmup=0, max_samples=30))
    assert (timing.status, len(timing.runs)) == ("unsteady", 30)
    assert "30 samples" in timing.message
    timing = timed(ScriptedStopwatch(alternating), Rule(warmup=0, cap_s=5.0), tick_s=1.0)
    assert (timing.status, len(timing.runs)) == ("unsteady", 6)


def test_the_confidence_interval_has_the_published_ranks() -> None:
    assert math.isinf(spread_of_median([1.0] * 5))
    assert spread_of_median([1.0] * 6) == 0.0
    # Le Boudec, Performance Evaluation, table A.1: of 100 samples the 95 % interval is from the 40th to the
    # 61st.
    samples = [float(rank) for rank in range(1, 101)]
    assert spread_of_median(samples) * Spread.of(samples).median == pytest.approx(61 - 40)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Rule(warmup=2, min_samples=6), ["run", "wait"] * 2 + ["flush", "run", "wait"] * 6),
        (Rule(warmup=0, min_samples=6, flush=False), ["run", "wait"] * 6),
        (Rule(warmup=0, min_samples=6, hide=True), ["flush", "busy", "run", "wait"] * 6),
    ],
)
def test_the_cache_is_flushed_and_the_device_kept_busy_as_the_rule_says(
    rule: Rule, expected: list[str]
) -> None:
    watch = ScriptedStopwatch()
    timed(watch, rule)
    assert watch.events == expected


def test_the_device_spins_longer_than_the_host_needed_in_the_warm_up() -> None:
    for issue_s, spin_s in ((4e-3, 6e-3), (0.0, BUSY_S)):
        watch = ScriptedStopwatch(issue_s=lambda spin, issue_s=issue_s: issue_s)
        timing = timed(watch, Rule(warmup=1, min_samples=6, hide=True))
        assert watch.spins == [spin_s] * 6
        assert timing.host["total"] == pytest.approx([issue_s] * 6)


def test_a_sample_that_the_device_reached_too_early_is_repeated_after_a_longer_spin() -> None:
    watch = ScriptedStopwatch(issue_s=lambda spin: 9e-3 if spin == 2 else 1e-3)
    timing = timed(watch, Rule(warmup=1, min_samples=6, hide=True))
    assert (timing.status, timing.runs) == ("done", [1, 2, 4, 5, 6, 7])
    assert watch.spins == pytest.approx([1.5e-3] * 3 + [13.5e-3] * 4)
    assert max(timing.host["total"]) < 2e-3
    assert timing.discarded == 0
    watch = ScriptedStopwatch()  # Work that waits for the device: no spin is long enough.
    watch.issue_s = lambda spin: 2.0 * watch.spins[-1] if watch.spins else 1e-3
    watch.reached = lambda mark: True
    timing = timed(watch, Rule(warmup=0, min_samples=6, hide=True))
    assert (timing.status, timing.laps) == ("failed", {})
    assert "before the host had issued" in timing.message


def test_the_first_run_may_compile_for_longer_than_the_cap() -> None:
    watch, seconds = ScriptedStopwatch(), iter([0.0, 0.0, 100.0, *range(101, 200)])
    rule = Rule(warmup=0, min_samples=6, cap_s=10.0)
    timing = take(lambda lap: watch.ran(), watch, rule, clock=lambda: next(seconds))
    assert (timing.status, len(timing.runs)) == ("done", 6)


def test_the_cpus_flush_writes_more_than_its_last_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = CpuStopwatch()
    assert watch._cold.numel() == watch.flush_bytes >= 2**20
    watch._cold[-9:].fill_(1)
    watch.flush()
    assert not watch._cold[-9:].any()


def test_throttled_samples_are_discarded_and_the_device_rests_longer_each_time() -> None:
    watch = ScriptedStopwatch(
        lambda sample: 9.0 if sample in (2, 3) else 1.0, lambda sample: sample in (2, 3)
    )
    timing = timed(watch, Rule(warmup=0, min_samples=10))
    assert (timing.status, timing.laps["total"], timing.discarded) == ("done", [1.0] * 10, 2)
    assert watch.rests == [0.01] + [0.02] * 8
    assert timing.runs == [0, 1, 4, 5, 6, 7, 8, 9, 10, 11]
    watch = ScriptedStopwatch(held=lambda sample: sample == 2)
    timed(watch, Rule(warmup=2, min_samples=6, rest_s=0.015))
    assert watch.rests == [0.015] * 3 + [0.03] * 4


class Rested(ScriptedStopwatch):
    """A device that is held down unless it rested for 0.3 s before."""

    def throttled(self) -> tuple[str, ...]:
        return () if self.rests and self.rests.pop() >= 0.3 else CAP


def test_work_that_needs_a_rest_before_each_sample_gets_one() -> None:
    timing = timed(Rested(), Rule(warmup=0, min_samples=15, max_samples=15))
    assert (timing.status, len(timing.runs), timing.reasons) == ("done", 15, CAP)
    assert timing.discarded == 6  # Without a rest, then after 10, 20, 40, 80 and 160 ms.
    assert timing.after(6, 10).discarded == 0


def test_a_throttled_run_has_no_number_and_ends_before_the_cap() -> None:
    watch = ScriptedStopwatch(held=lambda sample: sample % 4 != 0)
    timing = timed(watch, Rule(warmup=0, min_samples=10, cap_s=20.0), tick_s=1.0)
    assert (timing.status, timing.laps, timing.spread()) == ("throttled", {}, None)
    watch = ScriptedStopwatch(held=lambda sample: True)
    timing = timed(watch, Rule(warmup=0, min_samples=10, cap_s=1e9))
    # Eight without the longest rest, eight after it.
    assert (timing.status, timing.discarded) == ("throttled", 16)
    assert watch.rests[-PATIENCE:] == [LONGEST_REST_S] * PATIENCE
    assert timing.message == "the clocks were held down (software power cap) in 16 of 16 samples"


def test_laps_are_parts_and_one_that_comes_twice_is_summed() -> None:
    watch = ScriptedStopwatch()

    def two_micro_batches(lap: Lap) -> None:
        for name in ("forward", "backward", "forward", "backward"):
            lap(name)
            watch.ran()

    timing = take(two_micro_batches, watch, Rule(warmup=0, min_samples=6))
    assert timing.laps == {"total": [4.0] * 6, "forward": [2.0] * 6, "backward": [2.0] * 6}


def test_samples_after_a_number_of_warm_ups_are_of_one_series() -> None:
    watch = ScriptedStopwatch(lambda sample: 9.0 if sample == 0 else 1.0)
    timing = timed(watch, Rule(warmup=0, min_samples=15, max_samples=15))
    assert timing.after(0, 10).laps["total"] == [9.0] + [1.0] * 9
    warm = steadied(timing.after(1, 10), Rule(min_samples=10))
    assert (warm.laps["total"], warm.status) == ([1.0] * 10, "done")
    assert len(timing.after(10, 10).runs) == 5


# -- clocks --


class Nvml:
    """Returns clocks and reasons in turn, one pair for each reading."""

    def __init__(self, states: list[tuple[int, tuple[str, ...]]]):
        self.states, self.at = states, -1

    def clocks_mhz(self) -> dict[str, int]:
        self.at += 1
        return {"sm": self.states[self.at][0], "sm_max": 1980}

    def throttled(self) -> tuple[str, ...]:
        return self.states[self.at][1]


class Event:
    """An event that the device reaches after ``times`` queries."""

    def __init__(self, times: int):
        self.left = times

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0


def cuda_stopwatch(*states: tuple[int, tuple[str, ...]]) -> CudaStopwatch:
    watch = object.__new__(CudaStopwatch)
    watch._nvml, watch._clocks, watch._seen = cast(Any, Nvml(list(states))), {}, {}
    return watch


def test_only_the_clocks_of_kept_samples_count_and_of_a_long_one_the_lowest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch = cuda_stopwatch((1980, ()), (1320, CAP), (1905, ()), (1500, CAP))
    for _ in range(4):
        if not watch.held_until(cast(Any, Event(0))):
            watch.kept()
    assert watch._clocks == {"sm": 1905, "sm_max": 1980}
    monkeypatch.setattr("trainfit.bench.harness.stopwatch.POLL_S", -1.0)
    watch = cuda_stopwatch((1980, ()), (1800, ()), (1900, ()))
    assert watch.held_until(cast(Any, Event(2))) == ()
    watch.kept()
    assert watch._clocks["sm"] == 1800


def test_the_harness_reports_which_samples_count() -> None:
    watch = Held(lambda reading: reading < 2)
    timing = take(lambda lap: None, watch, Rule(warmup=0, min_samples=6, max_samples=6))
    assert (watch.num_kept, timing.discarded) == (6, 2)
    assert watch.environment(host_environment("cpu")).clocks_mhz == {}
