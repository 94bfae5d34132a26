"""A GPU throttled by its driver: no step times, with the reason on the first line; memory is valid."""

import io
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tiny_recipe import tiny_recipe
from tiny_training import Listener, options_for, tiny
from trainfit.bench.harness.stopwatch import CpuStopwatch
from trainfit.calibration.op_timer import OpTimer
from trainfit.measurement import meter
from trainfit.measurement.nvml import CLOCK_EVENTS, SAMPLE_EVERY_S, Watched
from trainfit.measurement.ranks import combined
from trainfit.measurement.run import measure
from trainfit.report.compare import Comparison
from trainfit.report.results import show_measurement, show_training
from trainfit.spec.bench import SLOWDOWNS, Environment
from trainfit.spec.result import Measurement, Outcome, Record
from trainfit.spec.sweep import SweepFile, Variant
from trainfit.sweeps.rows import row_of
from trainfit.training import gauges
from trainfit.training.loop import train
from trainfit.training.progress import step_line
from trial_start import a_fork_can_train, forked

HOT, CAP = "software thermal slowdown", "software power cap"


class Nvml:
    """In place of the driver: reasons and clocks in turn, then the last ones."""

    def __init__(self, *states: tuple[int, tuple[str, ...]]):
        self.states, self.now = list(states), states[0]

    def throttled(self) -> tuple[str, ...]:
        self.now = self.states.pop(0) if self.states else self.now
        return self.now[1]

    def clocks_mhz(self) -> dict[str, int]:
        return {"sm": self.now[0], "sm_max": 1980}

    def utilisation(self) -> float:
        return 0.5

    def memory_access(self) -> float:
        return 0.25


def environment(*reasons: str, sm: int = 435) -> Environment:
    return Environment(
        device="NVIDIA H100", device_bytes=80 * 2**30, driver="580", torch="2.11.0", cuda="12.8",
        python="3.12", platform="linux", clocks_mhz={"sm": sm, "sm_max": 1980}, throttled=reasons,
    )  # fmt: skip


def test_the_power_cap_is_no_slowdown_and_the_names_are_those_of_nvml() -> None:
    assert set(SLOWDOWNS) == set(CLOCK_EVENTS.values()) - {CAP}
    assert environment(CAP).held_back == ()
    assert environment(CAP, HOT).held_back == (HOT,)


def test_the_clocks_are_watched_while_the_steps_run() -> None:
    nvml = Nvml((1500, (CAP,)), (435, (HOT,)), (600, (HOT, CAP)), (1900, ()))
    with Watched(nvml) as watched:
        deadline = time.monotonic() + 20
        while nvml.states and time.monotonic() < deadline:
            time.sleep(SAMPLE_EVERY_S)
        watched.take()
    assert watched.reasons == {HOT, CAP}
    assert watched.clocks_mhz == {"sm": 435, "sm_max": 1980}  # Over as the steps ended, and still noted.
    with Watched(Nvml((1500, (CAP,)), (1450, (CAP,)))) as watched:
        watched.take()
        watched.take()
    assert (watched.reasons, watched.clocks_mhz["sm"]) == ({CAP}, 1450)


def test_later_steps_do_not_hide_what_slowed_earlier_ones() -> None:
    with Watched(Nvml((435, (HOT,)))) as first:
        first.take()
    with Watched(Nvml((1900, ())), first) as second:
        second.take()
    assert second.reasons == {HOT}
    assert second.clocks_mhz["sm"] == 435
    assert len(second.readings) > len(first.readings)


@pytest.mark.skipif(not a_fork_can_train(), reason="a new interpreter has no faked driver")
def test_a_measurement_has_its_memory_and_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny_recipe()

    def measured(*reasons: str) -> Measurement:
        held = {"environment": environment(*reasons)}
        monkeypatch.setattr(meter.CpuMeter, "totals", lambda self: held)
        how: dict[str, Any] = {"model_flops": 1e9, "peak_flops_per_s": 1e12}
        return measure(recipe, steps=2, device="cpu", start=forked, timeout_s=200, **how)

    cold, hot = measured(CAP), measured(HOT, CAP)
    assert cold.step_s
    assert cold.mfu
    assert cold.message == ""
    assert (hot.status, hot.phases, hot.peak_allocated_bytes) == (
        "done",
        cold.phases,
        cold.peak_allocated_bytes,
    )
    assert (hot.step_s, hot.step_times, hot.tokens_per_s, hot.mfu) == (None, None, None, None)
    assert hot.losses == cold.losses
    assert "the driver throttled the GPU to 435 of 1980 MHz (software thermal slowdown)" in hot.message
    show_measurement(recipe, hot, out=Console(file=(out := io.StringIO()), width=300))
    shown = out.getvalue()
    assert shown.splitlines()[0].startswith("DONE: no step time: the driver throttled the GPU")
    assert "time a step" not in shown


def done(*reasons: str, step_s: float | None = 0.5, **fields: Any) -> Measurement:
    return Measurement(
        recipe_id=tiny_recipe().id, status="done", environment=environment(*reasons), step_s=step_s,
        peak_allocated_bytes=2**20, **fields,
    )  # fmt: skip


def test_one_rank_that_is_held_back_makes_the_time_of_all_no_figure() -> None:
    recipe = tiny_recipe()
    both = combined(recipe, [done(CAP), done(CAP, step_s=0.75)])
    assert (both["step_s"], both["environment"].held_back) == (0.75, ())
    hot = done(HOT, step_s=None, message="no time: hot")
    for ranks in ([done(CAP), hot], [hot, done(CAP)]):
        found = combined(recipe, ranks)
        assert (found["step_s"], found["step_times"], found["tokens_per_s"]) == (None, None, None)
        assert found["environment"].held_back == (HOT,)
        assert f"rank {ranks.index(hot)}: no time: hot" in found["message"]


def test_a_record_made_before_gives_no_time_to_reports_and_sweeps() -> None:
    recipe, hot = tiny_recipe(), done(HOT, mfu=0.1, tokens_per_s=64.0)
    one = Comparison(recipe, None, hot)
    assert [one.value("measured", name) for name in ("step_s", "tokens_per_s", "mfu")] == [None] * 3
    assert one.value("measured", "peak_allocated_bytes") == 2**20
    assert HOT in one.lacking
    record = Record(
        kind="measure", created_at="", version="", commit=None, recipe={}, recipe_id="", measurement=hot,
        outcome=Outcome(status="done", request_id=""),
    )  # fmt: skip
    file = SweepFile(base="x", measure={}, predict=False)  # pyright: ignore[reportArgumentType]
    row = row_of(Variant(name="a", recipe=recipe), file, {"measure": record})
    assert (row.samples_per_s, row.mfu, row.measured_bytes) == (None, None, 2**20)


def test_calibrate_keeps_no_operation_that_was_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons: tuple[str, ...] = (CAP,)
    monkeypatch.setattr(CpuStopwatch, "held_until", lambda self, end: reasons)
    timer = OpTimer(CpuStopwatch(), None, lambda: False)
    timer.part = "sums"
    with timer:
        _ = torch.ones(64) + 1.0
        timer.finish()
        cold, reasons = len(timer.rows), (HOT,)
        _ = torch.ones(128) + 1.0, torch.ones(256) + 1.0
    timer.finish()
    assert cold
    assert len(timer.rows) == cold
    assert next(line for line in timer.failures if HOT in line).startswith("sums: ")


def test_training_says_it_while_it_lasts_and_leaves_such_steps_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = [(1900, ()), (1900, (CAP,)), (435, (HOT,)), (435, (HOT,)), (1900, ())]
    nvml = Nvml(*states)
    begin = gauges.Load.__init__

    def with_driver(self: Any, device: torch.device) -> None:
        begin(self, device)
        self._nvml = nvml

    monkeypatch.setattr(gauges.Load, "__init__", with_driver)
    monkeypatch.setattr(gauges, "SAMPLE_EVERY_S", 0.0)
    listener = Listener()
    summary = train(tiny(), options_for(tmp_path, 5), observers=[listener])
    assert [step.held_back for step in listener.steps] == [None, None, (HOT,), (HOT,), None]
    assert [HOT in step_line(step, "GPU") for step in listener.steps] == [False, False, True, True, False]
    assert summary.held_back == {HOT: 2}
    cold = [step.step_s for step in listener.steps if not step.held_back]
    assert summary.step_s in cold
    show_training(tiny(), summary, out=Console(file=(out := io.StringIO()), width=200))
    assert "2 steps" in out.getvalue()
