"""DDP's expected and possible peak: what is decided by which, and that a measurement may meet either."""

import io
import json

import pytest
from rich.console import Console

from trainfit.cli.records.report import _content
from trainfit.measurement.environment import host_environment
from trainfit.report.compare import Comparison, compare
from trainfit.report.comparisons import text_table
from trainfit.report.prediction_text import show, verdict
from trainfit.report.results import prediction_html
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.provenance import from_line, new_record, to_line
from trainfit.spec.result import (
    HELD_BUCKETS,
    Estimate,
    Measurement,
    MemoryBreakdown,
    Peak,
    PhasePeaks,
    Phases,
    TwoPeaks,
)
from trainfit.spec.sweep import Row
from trainfit.spec.units import GIB
from trainfit.verification import verify

DDP = recipe_from({"model": {"config": "gpt2"}, "hardware": {"count": 2}, "parallel": {"strategy": "ddp"}})
LOW, HIGH, OUTSIDE = 60 * GIB, 78 * GIB, 2 * GIB
CARD = 79 * GIB


def phases(peak: int) -> Phases:
    steps = PhasePeaks(forward=GIB, backward=peak, optimizer=GIB)
    return Phases(after_init=GIB, first=steps, steady=steps)


def peak(size: int) -> Peak:
    return Peak(allocated=size, reserved=size, device=size + OUTSIDE)


def estimate(*, both: bool = True) -> Estimate:
    peaks = TwoPeaks(
        expected=peak(LOW), possible=peak(HIGH), possible_phases=phases(HIGH), reason=HELD_BUCKETS
    )
    return Estimate(
        recipe_id=DDP.id, phases=phases(LOW), breakdown=MemoryBreakdown(weights=LOW), num_gpus=2,
        peak_phase="steady.backward", peak_allocated_bytes=LOW, peak_reserved_bytes=LOW,
        peak_device_bytes=LOW + OUTSIDE, two_peaks=peaks if both else None, device_bytes=CARD, fits=not both,
        params=1, trainable_params=1, model_flops=1.0, hardware_flops=1.0, flops_convention="", step_s=None,
        time=None, tokens_per_s=None, mfu=None, hfu=None, cost=None,
    )  # fmt: skip


def measurement(size: int) -> Measurement:
    return Measurement(
        recipe_id=DDP.id, status="done", phases=phases(size), peak_allocated_bytes=size,
        peak_reserved_bytes=size, environment=host_environment("cuda"),
    )  # fmt: skip


def test_the_verdict_is_by_the_possible_peak() -> None:
    two, one = estimate(), estimate(both=False)
    assert two.highest == peak(HIGH)
    assert one.highest == peak(LOW)
    assert (two.headroom_bytes, one.headroom_bytes) == (-GIB, 17 * GIB)
    assert verdict(DDP, two).startswith("DOES NOT FIT on each of 2 x h200: 80.00 GiB of 79.00 GiB")
    out = io.StringIO()
    show(DDP, two, out=Console(file=out, width=240))
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    assert "expected 60.00 GiB allocated, 60.00 GiB reserved, 62.00 GiB on the device" in lines
    sizes = "78.00 GiB allocated, 78.00 GiB reserved, 80.00 GiB on the device"
    assert f"possible {sizes}: {HELD_BUCKETS}; the verdict is by this peak" in lines
    assert sizes in prediction_html(DDP, two)
    show(DDP, one, out=Console(file=out, width=240))
    assert out.getvalue().count("possible") == 1
    content = json.loads(two.model_dump_json())
    assert content["two_peaks"]["expected"]["allocated"] == content["peak_allocated_bytes"] == LOW
    assert content["two_peaks"]["possible"]["allocated"] == HIGH


@pytest.mark.parametrize(
    ("size", "met", "error"), [(LOW, "expected", 0.0), (HIGH, "possible", 0.0), (2 * HIGH, "possible", -0.5)]
)
def test_a_measurement_may_meet_either(size: int, met: str, error: float) -> None:
    predicted, measured = estimate(), measurement(size)
    records = [
        new_record("predict", DDP, estimate=predicted),
        new_record("measure", DDP, measurement=measured),
    ]
    (found,) = compare(records)
    assert (found.peak_met, found.error("peak_allocated_bytes")) == (met, error)
    assert found.phase_errors()["steady.backward"] == error
    assert _content(found)["peak_met"] == met
    out = io.StringIO()
    Console(file=out, width=80).print(text_table([found]))
    assert f"the {met} one of two peaks" in " ".join(out.getvalue().split())
    check = verify._check(DDP, predicted, measured, "", False)
    assert (check.peak_met, check.errors["allocated"]) == (met, error)
    assert f"the {met} one of two peaks" in verify.outcome(check)
    row = Row(
        variant="ddp", recipe=DDP.content(), recipe_id=DDP.id, status="done", estimate=predicted,
        measurement=measured,
    )  # fmt: skip
    assert (row.peak_met, row.error) == (met, error)
    assert row.predicted_device_bytes == HIGH + OUTSIDE
    alone = Comparison(DDP, estimate(both=False), measured)
    assert alone.peak_met is None
    assert alone.error("peak_allocated_bytes") == (LOW - size) / size


def test_an_older_record_is_read_with_its_lower_peak_expected() -> None:
    """Its peaks were of the possible one; the lower one stood in ``other_peak``."""
    line = json.loads(to_line(new_record("predict", DDP, estimate=estimate(both=False))))
    del line["digest"]
    old = estimate(both=False).with_peak(None).model_dump(mode="json", exclude={"two_peaks"})
    old |= {f"peak_{name}_bytes": size for name, size in peak(HIGH)}
    for other, expected in ((dict(peak(LOW)), LOW), (None, HIGH)):
        line["estimate"] = old | {"other_peak": other}
        found = from_line(json.dumps(line), "old.jsonl:1").estimate
        assert found is not None
        assert (found.peak_allocated_bytes, found.highest) == (expected, peak(HIGH))
        assert (found.two_peaks is None) == (other is None)
