"""The timing harness: when it stops, what it throws away, and what it never gives a number for."""

import math
from collections.abc import Callable
from itertools import count

import pytest
import torch

from trainfit.bench.harness.bench import Bench, Part, failure_of
from trainfit.bench.harness.roofline import Work, is_impossible, least_seconds
from trainfit.bench.harness.stopwatch import BUSY_S, CpuStopwatch, Stopwatch
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
from trainfit.catalog.load import gpu
from trainfit.spec.bench import BenchRow, Environment, Spread
from trainfit.spec.errors import InputError


class ScriptedStopwatch(Stopwatch):
    """A device whose runs take scripted times; ``held``: samples in which its clocks are held down."""

    flush_bytes = 0

    def __init__(self, seconds: Callable[[int], float], held: Callable[[int], bool] = lambda sample: False):
        self.seconds, self.held = seconds, held
        self.now, self.samples, self.events, self.rests = 0.0, 0, [], []
        self.host, self.spins = 0.0, []
        self.issue_s: Callable[[int], float] = lambda spin: 0.0

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
        return ("software power cap",) if self.held(self.samples - 1) else ()

    def busy(self, seconds: float) -> None:
        self.spins.append(seconds)
        self.events.append("busy")

    def reached(self, mark: float) -> bool:
        """What spins for less than the host took is over too early."""
        return self.spins[-1] < self.issue_s(len(self.spins) - 1)

    def host_now(self) -> float:
        return self.host

    def environment(self, host: Environment) -> Environment:
        return host

    def rest(self, seconds: float) -> None:
        self.rests.append(seconds)


def ticking(step_s: float) -> Callable[[], float]:
    """A wall clock that is ``step_s`` later each time it is read."""
    ticks = count()
    return lambda: next(ticks) * step_s


def timed(watch: ScriptedStopwatch, rule: Rule, *, tick_s: float = 0.0) -> Timing:
    return take(lambda lap: watch.ran(), watch, rule, clock=ticking(tick_s))


def test_equal_samples_end_it_at_the_fewest() -> None:
    timing = timed(ScriptedStopwatch(lambda sample: 0.5), Rule(warmup=0, min_samples=10))
    assert (timing.status, len(timing.runs)) == ("done", 10)
    assert timing.laps["total"] == [0.5] * 10


def test_noise_takes_more_samples_until_the_median_is_known() -> None:
    noisy = ScriptedStopwatch(lambda sample: 1.0 + 0.03 * (sample * 7 % 11) / 11)
    timing = timed(noisy, Rule(warmup=0, min_samples=10, spread=0.02))
    assert timing.status == "done"
    assert 10 < len(timing.runs) < 200
    assert spread_of_median(timing.laps["total"]) <= 0.02
    assert spread_of_median(timing.laps["total"][:-1]) > 0.02  # It stopped at once.


def test_what_never_settles_is_unsteady_and_says_how_well_the_median_is_known() -> None:
    timing = timed(ScriptedStopwatch(lambda sample: 1.0 + sample % 2), Rule(warmup=0, max_samples=30))
    assert (timing.status, len(timing.runs)) == ("unsteady", 30)
    assert "30 samples" in timing.message


def test_the_time_cap_ends_it() -> None:
    timing = timed(ScriptedStopwatch(lambda sample: 1.0 + sample % 2), Rule(warmup=0, cap_s=5.0), tick_s=1.0)
    assert timing.status == "unsteady"
    assert len(timing.runs) == 6


def test_the_median_of_fewer_than_six_samples_is_not_known() -> None:
    assert math.isinf(spread_of_median([1.0] * 5))
    assert spread_of_median([1.0] * 6) == 0.0


def test_the_confidence_interval_has_the_published_ranks() -> None:
    # Le Boudec, Performance Evaluation, table A.1: of 100 samples the 95 % interval is from the 40th to the
    # 61st.
    samples = [float(rank) for rank in range(1, 101)]
    assert spread_of_median(samples) * Spread.of(samples).median == pytest.approx(61 - 40)


def test_the_cache_is_flushed_before_every_sample_and_only_if_asked() -> None:
    watch = ScriptedStopwatch(lambda sample: 1.0)
    timed(watch, Rule(warmup=2, min_samples=6, flush=True))
    assert watch.events == ["run", "wait"] * 2 + ["flush", "run", "wait"] * 6
    watch = ScriptedStopwatch(lambda sample: 1.0)
    timed(watch, Rule(warmup=0, min_samples=6, flush=False))
    assert "flush" not in watch.events


def test_the_device_is_kept_busy_after_the_flush_and_only_if_asked() -> None:
    watch = ScriptedStopwatch(lambda sample: 1.0)
    timed(watch, Rule(warmup=0, min_samples=6, hide=True))
    assert watch.events == ["flush", "busy", "run", "wait"] * 6
    watch = ScriptedStopwatch(lambda sample: 1.0)
    timed(watch, Rule(warmup=0, min_samples=6))
    assert "busy" not in watch.events


def test_the_device_spins_longer_than_the_host_asked_in_the_warm_up() -> None:
    watch = ScriptedStopwatch(lambda sample: 1.0)
    watch.issue_s = lambda spin: 4e-3
    timing = timed(watch, Rule(warmup=1, min_samples=6, hide=True))
    assert watch.spins == [6e-3] * 6
    assert timing.host["total"] == pytest.approx([4e-3] * 6)
    quick = ScriptedStopwatch(lambda sample: 1.0)
    timed(quick, Rule(warmup=1, min_samples=6, hide=True))
    assert quick.spins == [BUSY_S] * 6


def test_a_sample_that_the_device_came_to_too_early_is_taken_again_after_a_longer_spin() -> None:
    watch = ScriptedStopwatch(lambda sample: 1.0)
    watch.issue_s = lambda spin: 9e-3 if spin == 2 else 1e-3
    timing = timed(watch, Rule(warmup=1, min_samples=6, hide=True))
    assert (timing.status, timing.runs) == ("done", [1, 2, 4, 5, 6, 7])
    assert watch.spins == pytest.approx([1.5e-3] * 3 + [13.5e-3] * 4)
    assert max(timing.host["total"]) < 2e-3
    assert timing.discarded == 0


def test_work_that_waits_for_the_device_has_no_hidden_time() -> None:
    watch = ScriptedStopwatch(lambda sample: 1.0)
    watch.issue_s = lambda spin: 2.0 * watch.spins[-1] if watch.spins else 1e-3
    watch.reached = lambda mark: True
    timing = timed(watch, Rule(warmup=0, min_samples=6, hide=True))
    assert (timing.status, timing.laps) == ("failed", {})
    assert "before the host had issued" in timing.message


def test_a_rule_may_ask_for_a_rest_before_every_sample() -> None:
    watch = ScriptedStopwatch(lambda sample: 1.0, held=lambda sample: sample == 2)
    timed(watch, Rule(warmup=2, min_samples=6, rest_s=0.015))
    assert watch.rests == [0.015] * 3 + [0.03] * 4  # Longer once the clocks were held down in spite of it.


class Rested(ScriptedStopwatch):
    """A device that is held down unless it rested for ``enough_s`` before."""

    def __init__(self, enough_s: float):
        super().__init__(lambda sample: 1.0)
        self.enough_s = enough_s

    def throttled(self) -> tuple[str, ...]:
        cool = bool(self.rests) and self.rests.pop() >= self.enough_s
        return () if cool else ("software power cap",)


def test_work_that_needs_a_rest_before_each_sample_gets_one() -> None:
    timing = timed(Rested(0.3), Rule(warmup=0, min_samples=15, max_samples=15))
    assert (timing.status, len(timing.runs)) == ("done", 15)
    assert timing.discarded == 6  # Without a rest, then after 10, 20, 40, 80 and 160 ms.
    assert timing.after(6, 10).discarded == 0
    assert timing.reasons == ("software power cap",)


def test_the_first_run_may_compile_for_longer_than_the_cap() -> None:
    watch = ScriptedStopwatch(lambda sample: 1.0)
    seconds = iter([0.0, 0.0, 100.0, *range(101, 200)])
    timing = take(
        lambda lap: watch.ran(), watch, Rule(warmup=0, min_samples=6, cap_s=10.0), clock=lambda: next(seconds)
    )
    assert (timing.status, len(timing.runs)) == ("done", 6)


def test_the_cpus_flush_writes_more_than_its_last_cache() -> None:
    watch = CpuStopwatch()
    watch._cold.fill_(1)
    watch.flush()
    assert watch._cold.numel() == watch.flush_bytes >= 2**20
    assert int(watch._cold.sum()) == 0


def test_throttled_samples_are_thrown_away_and_the_device_rests_longer_each_time() -> None:
    watch = ScriptedStopwatch(
        lambda sample: 9.0 if sample in (2, 3) else 1.0, held=lambda sample: sample in (2, 3)
    )
    timing = timed(watch, Rule(warmup=0, min_samples=10))
    assert timing.status == "done"
    assert timing.laps["total"] == [1.0] * 10
    assert (timing.discarded, watch.rests) == (2, [0.01] + [0.02] * 8)
    assert timing.runs == [0, 1, 4, 5, 6, 7, 8, 9, 10, 11]


def test_a_throttled_run_has_no_number() -> None:
    watch = ScriptedStopwatch(lambda sample: 1.0, held=lambda sample: sample % 4 != 0)
    timing = timed(watch, Rule(warmup=0, min_samples=10, cap_s=20.0), tick_s=1.0)
    assert timing.status == "throttled"
    assert timing.laps == {}
    assert "software power cap" in timing.message
    assert timing.spread() is None


def test_laps_are_parts_and_one_that_comes_twice_is_summed() -> None:
    watch = ScriptedStopwatch(lambda sample: 1.0)

    def two_micro_batches(lap: Lap) -> None:
        for name in ("forward", "backward", "forward", "backward"):
            lap(name)
            watch.ran()

    timing = take(two_micro_batches, watch, Rule(warmup=0, min_samples=6), clock=ticking(0.0))
    assert timing.laps == {"total": [4.0] * 6, "forward": [2.0] * 6, "backward": [2.0] * 6}


def test_samples_after_a_number_of_warm_ups_are_of_one_series() -> None:
    watch = ScriptedStopwatch(lambda sample: 9.0 if sample == 0 else 1.0)
    timing = timed(watch, Rule(warmup=0, min_samples=15, max_samples=15))
    assert timing.after(0, 10).laps["total"] == [9.0] + [1.0] * 9
    warm = steadied(timing.after(1, 10), Rule(min_samples=10))
    assert (warm.laps["total"], warm.status) == ([1.0] * 10, "done")
    assert len(timing.after(10, 10).runs) == 5


def test_the_roofline_is_the_longer_of_arithmetic_and_memory() -> None:
    h200 = gpu("h200")
    matmul = Work(2 * 8192**3, "bf16")
    assert least_seconds(matmul, h200, 0) == pytest.approx(2 * 8192**3 / 9.894e14)
    copy = Work(cold_read_bytes=1e9, write_bytes=1e9)
    assert least_seconds(copy, h200, 0) == pytest.approx(2e9 / 4.8e12)
    # What is written may still be in the cache; what is read from outside of it is not.
    assert least_seconds(copy, h200, 2 * 10**9) == pytest.approx(1e9 / 4.8e12)


def test_clocks_above_the_data_sheets_are_not_called_impossible() -> None:
    assert not is_impossible(0.93, 1.0)  # 1830 MHz over 1980 MHz is 0.924.
    assert is_impossible(0.91, 1.0)
    assert not is_impossible(1e-9, None)


def test_a_device_that_stays_throttled_is_given_up_before_the_cap() -> None:
    watch = ScriptedStopwatch(lambda sample: 1.0, held=lambda sample: True)
    timing = timed(watch, Rule(warmup=0, min_samples=10, cap_s=1e9))
    # Nine without the longest rest, eight after it.
    assert (timing.status, timing.discarded) == ("throttled", 16)
    assert watch.rests[-PATIENCE:] == [LONGEST_REST_S] * PATIENCE
    assert timing.message == "the clocks were held down (software power cap) in 16 of 16 samples"


@pytest.fixture
def bench() -> Bench:
    watch = ScriptedStopwatch(lambda sample: 2.3e-4)
    return Bench(torch.device("cpu"), "tiny", watch, gpu("h200"), Rule(warmup=0, min_samples=6), math.inf)


def one_row(bench: Bench, part: Part, build: Callable[[], Callable[[Lap], object]]) -> BenchRow:
    (row,) = bench.time([part], build, Rule(warmup=0, min_samples=6, cap_s=1.0))
    return row


def test_a_published_attention_time_is_impossible(bench: Bench) -> None:
    # 0.23 ms is published for an attention forward, timed without synchronisation. Of 8 x 16,384 tokens, head
    # 64, fp32 it is impossible.
    work = Work(4.0 * 8 * 16384**2 * 64, "fp32")
    assert is_impossible(2.3e-4, least_seconds(work, gpu("h200"), 0))
    watch = bench.stopwatch
    assert isinstance(watch, ScriptedStopwatch)
    part = Part({"seq": 16384}, work=work, rates=lambda seconds: {"tflops_per_s": 1.0})
    row = one_row(bench, part, lambda: lambda lap: watch.ran())
    assert row.status == "impossible"
    assert row.numbers == {}
    assert row.times is not None
    assert "8.21 ms" in row.message
    possible = one_row(
        bench, Part({"seq": 256}, work=Work(4.0 * 8 * 256**2 * 64, "fp32")), lambda: lambda lap: watch.ran()
    )
    assert possible.status == "done"


@pytest.mark.parametrize(("flush", "status"), [(True, "impossible"), (False, "done")])
def test_what_a_warm_cache_may_hold_bounds_no_time(bench: Bench, flush: bool, status: str) -> None:
    watch, part = bench.stopwatch, Part({"copy": 1}, work=Work(cold_read_bytes=4.8e9))  # 1 ms at 4.8 TB/s
    assert isinstance(watch, ScriptedStopwatch)
    rule = Rule(warmup=0, min_samples=6, cap_s=1.0, flush=flush)
    (row,) = bench.time([part], lambda: lambda lap: watch.ran(), rule)
    assert row.status == status


def failing(error: Exception) -> Callable[[], Callable[[Lap], object]]:
    def build() -> Callable[[Lap], object]:
        raise error

    return build


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64 GiB"), "out-of-memory"),
        (InputError("no such kernel", "use another"), "refused"),
        (RuntimeError("an illegal memory access\nmore lines"), "failed"),
    ],
)
def test_a_failed_point_is_a_typed_row_without_a_number(bench: Bench, error: Exception, status: str) -> None:
    row = one_row(bench, Part({"seq": 1}), failing(error))
    assert (row.status, row.times, row.numbers) == (status, None, {})
    assert failure_of(error)[1] == row.message
    assert "\n" not in row.message


def test_no_point_begins_after_the_limit(bench: Bench) -> None:
    bench.ends_at = -math.inf
    row = one_row(bench, Part({"seq": 1}), failing(AssertionError("must not be built")))
    assert row.status == "not-run"


@pytest.mark.parametrize("status", ["throttled", "failed", "out-of-memory", "refused", "not-run"])
def test_a_row_cannot_be_made_with_a_number_of_a_run_that_was_none(status: str) -> None:
    with pytest.raises(ValueError, match="has no numbers"):
        BenchRow(point={}, status=status, message="why", times=Spread.of([1.0]))
    with pytest.raises(ValueError, match="has no numbers"):
        BenchRow(point={}, status=status, message="why", numbers={"tflops_per_s": 1.0})
    with pytest.raises(ValueError, match="says why"):
        BenchRow(point={}, status=status)
