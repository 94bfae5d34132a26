"""Rows of the harness: a number only from a clean and possible run, and a reason for every other point."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bench_rows import CAP, Held, tiny_bench
from kernel_runs import interpreted_loops
from trainfit.bench.experiments import transformer
from trainfit.bench.harness.bench import Part, failure_of, of_work
from trainfit.bench.harness.roofline import SLACK, Work, least_seconds
from trainfit.bench.harness.stopwatch import CpuStopwatch
from trainfit.bench.harness.timing import Lap, Rule, Timing
from trainfit.bench.workloads import attention
from trainfit.bench.workloads.attention import Case
from trainfit.catalog.load import gpu
from trainfit.spec.bench import BenchRow, Spread
from trainfit.spec.errors import InputError
from trainfit.spec.result import PHASES

SIX = Rule(warmup=0, min_samples=6, max_samples=6, spread=9.0)


class Fixed(CpuStopwatch):
    """A CPU on which every sample takes 0.23 ms."""

    def between(self, start: float, end: float) -> float:
        return 2.3e-4


def row_of(part: Part, rule: Rule = SIX, build: Callable[[], Any] = lambda: lambda lap: None) -> BenchRow:
    """Return the one row of a run on a device with an H200's data sheet."""
    (row,) = tiny_bench(Fixed(), gpu=gpu("h200"), rule=rule).time([part], build)
    return row


def test_the_least_time_is_the_longer_of_arithmetic_and_memory() -> None:
    h200 = gpu("h200")
    matmul = Work(2 * 8192**3, "bf16")
    assert least_seconds(matmul, h200, 0) == pytest.approx(2 * 8192**3 / 9.894e14)
    copy = Work(cold_read_bytes=1e9, write_bytes=1e9)
    assert least_seconds(copy, h200, 0) == pytest.approx(2e9 / 4.8e12)
    # What is written may still be in the cache; what is read from outside of it is not.
    assert least_seconds(copy, h200, 2 * 10**9) == pytest.approx(1e9 / 4.8e12)
    assert SLACK < 1830 / 1980  # MHz: clocks may exceed those of the data sheet.


def test_a_published_attention_time_is_impossible() -> None:
    """0.23 ms is published for a forward of 8 x 16,384 tokens, head 64, fp32, without synchronization."""
    work = Work(4.0 * 8 * 16384**2 * 64, "fp32")
    row = row_of(Part({"seq": 16384}, work=work, rates=lambda seconds: {"tflops_per_s": 1.0}))
    assert (row.status, row.numbers) == ("impossible", {})
    assert row.times is not None
    assert "8.21 ms" in row.message
    assert row_of(Part({"seq": 256}, work=Work(4.0 * 8 * 256**2 * 64, "fp32"))).status == "done"


@pytest.mark.parametrize(("flush", "status"), [(True, "impossible"), (False, "done")])
def test_what_a_warm_cache_may_hold_bounds_no_time(flush: bool, status: str) -> None:
    part = Part({"copy": 1}, work=Work(cold_read_bytes=4.8e9))  # 1 ms at 4.8 TB/s
    rule = Rule(warmup=0, min_samples=6, max_samples=6, spread=9.0, flush=flush)
    assert row_of(part, rule).status == status


def failing(error: BaseException) -> Callable[[], Callable[[Lap], object]]:
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
def test_a_failed_point_is_a_typed_row_without_a_number(error: Exception, status: str) -> None:
    row = row_of(Part({"seq": 1}), build=failing(error))
    assert (row.status, row.times, row.numbers) == (status, None, {})
    assert failure_of(error)[1] == row.message
    assert "\n" not in row.message


def test_no_point_begins_after_the_limit() -> None:
    bench = tiny_bench(ends_at=-math.inf)
    (row,) = bench.time([Part({"seq": 1})], failing(AssertionError("must not be built")))
    assert row.status == "not-run"


@pytest.mark.parametrize("status", ["throttled", "failed", "out-of-memory", "refused", "not-run"])
def test_a_row_without_a_clean_run_takes_no_number(status: str) -> None:
    for wrong in ({"times": Spread.of([1.0])}, {"numbers": {"tflops_per_s": 1.0}}):
        with pytest.raises(ValueError, match="has no numbers"):
            BenchRow.model_validate({"point": {}, "status": status, "message": "why", **wrong})
    with pytest.raises(ValueError, match="says why"):
        BenchRow.model_validate({"point": {}, "status": status})
    bytes_alone = {"point": {}, "status": status, "message": "why", "numbers": {"a_bytes": 1}}
    if status == "throttled":
        assert BenchRow.model_validate(bytes_alone).numbers
    else:
        with pytest.raises(ValueError, match="has no numbers"):
            BenchRow.model_validate(bytes_alone)


@interpreted_loops
def test_a_throttled_row_keeps_its_bytes_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    held: dict[str, Any] = {}

    def build() -> Any:
        held["before_backward_bytes"] = 384
        return lambda lap: None

    part = Part({"seq": 1}, rates=of_work(1e9), held=held)
    (row,) = tiny_bench(Held(), rule=SIX).time([part], build)
    assert (row.status, row.times, row.numbers) == ("throttled", None, {"before_backward_bytes": 384})
    (row,) = tiny_bench(rule=SIX).time([part], build)
    assert set(row.numbers) == {"tflops_per_s", "before_backward_bytes"}
    monkeypatch.setattr(attention, "before_backward", lambda *_: {"before_backward_bytes": 7})
    found = attention.rows(tiny_bench(Held(), rule=SIX), Case("ours", "fp32", 1, 1, 8, 16, True))
    rows = {row.point["pass"]: row for row in found}
    assert {row.status for row in rows.values()} == {"throttled"}
    assert [rows[which].numbers for which in attention.PASSES] == [{"before_backward_bytes": 7}, {}, {}]


# -- warm-up steps of a series --


def warm_ups(*held: int) -> dict[int, BenchRow]:
    """Rows by number of warm-up steps, with the clocks held down in the steps ``held``."""
    bench = tiny_bench(Held(lambda step: step in held), only={"precision": frozenset({"bf16"})})
    return {int(row.point["warm-up"]): row for row in transformer.run(bench)}


def test_without_the_first_step_there_is_no_number_without_warm_up() -> None:
    rows = warm_ups(0, 1)
    assert (rows[0].status, rows[0].times, rows[0].numbers) == ("throttled", None, {})
    assert CAP[0] in rows[0].message
    assert "first step" in rows[0].message
    assert [rows[w].numbers["steps_before"] for w in (1, 2, 5)] == [2, 2, 5]
    assert [rows[w].discarded for w in (1, 2, 5)] == [1, 0, 0]
    assert rows[1].times == rows[2].times


def test_throttled_steps_are_discarded_and_the_next_ones_count() -> None:
    rows = warm_ups(3, 7)
    assert {w: row.numbers["steps_before"] for w, row in rows.items()} == {0: 0, 1: 1, 2: 2, 5: 5}
    assert {w: row.discarded for w, row in rows.items()} == {0: 2, 1: 2, 2: 2, 5: 1}
    for row in rows.values():
        assert row.times is not None
        assert len(row.times.samples) == transformer.NUM_TIMED
    laps = {name: [1.0, 2.0] for name in (*PHASES, "total")}
    assert set(transformer.moments(Timing(laps=laps))) <= set(rows[0].numbers)
    assert warm_ups(1)[0].times is not None  # A later step was lost, and the first kept.
