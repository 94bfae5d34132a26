"""Products back to back: what is counted and discarded; each kind computes a linear layer's products."""

from typing import Any

import pytest
import torch
from torch import Tensor

from bench_rows import CPU
from trainfit.bench.harness.runner import run
from trainfit.bench.harness.stopwatch import CpuStopwatch
from trainfit.bench.harness.timing import Rule
from trainfit.bench.workloads import sustained
from trainfit.bench.workloads.sustained import PRODUCTS, Span, back_to_back, rounded


class Device(CpuStopwatch):
    """A device of its own time: a layer takes 10 ms, and three times as long after ``slow_after``."""

    def __init__(self, reasons: tuple[str, ...], slow_after: float = float("inf")):
        self.now, self.reasons, self.slow_after = 0.0, reasons, slow_after

    def layer(self, lap: Any) -> None:
        for name in PRODUCTS:
            lap(name)
            self.now += (0.03 if self.now >= self.slow_after else 0.01) / 3

    def mark(self) -> float:
        return self.now

    def throttled(self) -> tuple[str, ...]:
        return self.reasons

    def state(self) -> dict[str, float]:
        return {"sm_mhz": 1500.0, "watts": 700.0}


def taken(device: Device, max_samples: int = 200) -> Any:
    rule = Rule(min_samples=10, max_samples=max_samples, spread=0.5)
    return back_to_back(device.layer, device, Span(lead_s=1.0, counted_s=2.0), rule, clock=lambda: device.now)


def test_only_what_runs_at_the_clocks_of_the_power_limit_is_counted() -> None:
    timing, seen = taken(Device(("software power cap",), slow_after=0.8))
    assert timing.status == "done"
    assert set(timing.laps) == {*PRODUCTS, "total"}
    assert timing.laps["total"] == pytest.approx([0.03] * len(timing.runs))
    assert timing.laps["forward"] == pytest.approx([0.01] * len(timing.runs))
    assert 30 <= len(timing.runs) <= 36  # Two seconds of two layers each.
    assert seen == {"sm_mhz": 1500.0, "watts": 700.0, "held_by": "software power cap"}


def test_no_more_samples_are_issued_than_the_rule_allows() -> None:
    timing, _ = taken(Device(()), max_samples=20)
    assert 20 <= len(timing.runs) <= 20 + sustained.AHEAD


def test_clocks_held_down_for_another_reason_make_no_number() -> None:
    timing, seen = taken(Device(("hardware thermal slowdown", "software power cap")))
    assert (timing.status, timing.laps, seen) == ("throttled", {}, {})
    assert "hardware thermal slowdown" in timing.message


def test_fp8_products_are_those_of_the_layer() -> None:
    """Against bf16: e4m3 keeps 3 bits of a product's operands, e5m2 two, and errors of many terms cancel."""
    torch.manual_seed(0)
    x, w, g = (torch.randn(*shape).bfloat16() for shape in ((64, 32), (48, 32), (64, 48)))
    exact = [product() for product in sustained._bf16_products(x, w, g)]
    assert [one.shape for one in exact] == [(64, 48), (64, 32), (48, 32)]
    assert torch.equal(exact[0], torch.nn.functional.linear(x, w))
    for found, wanted in zip(sustained._fp8_products(x, w, g), exact, strict=True):
        off = (found().float() - wanted.float()).norm() / wanted.float().norm()
        assert 0.001 < off < 0.15


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_operands_use_the_whole_range_of_their_format(dtype: torch.dtype) -> None:
    x: Tensor = torch.randn(32, 32, generator=torch.Generator().manual_seed(0)).mul(1e-4).bfloat16()
    low, scale = rounded(x, dtype)
    assert low.float().abs().max() == torch.finfo(dtype).max
    torch.testing.assert_close(low.float() * scale, x.float(), atol=0.0, rtol=0.13)


def test_each_kind_runs_alone_and_a_gpu_has_torchaos_layer_too(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = run("gpu", device="cpu", form="tiny", only={"sustained": ["bf16", "fp8"]}).rows
    assert {row.point["product"] for row in rows} == {*PRODUCTS, "all"}
    assert {row.point["sustained"] for row in rows} == {"bf16", "fp8"}
    assert all(row.times is not None and row.numbers["tflops_per_s"] for row in rows)
    monkeypatch.setitem(sustained.KINDS, "cpu", sustained.KINDS["cuda"])
    rows = run("gpu", device="cpu", form="full", limit_s=0, only={"sustained": ["fp8-casts"]}).rows
    assert {row.point["product"] for row in rows} == {"forward", "both gradients", "all"}
    assert len(rows) == 3 * len(sustained.SHAPES["full"])


def test_torchaos_layer_is_run_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not compiled: the same layer."""
    pytest.importorskip("torchao")
    monkeypatch.setattr(torch, "compile", lambda module, **options: module)
    laps: list[str] = []
    gradients: Any = sustained.layer("fp8-casts", 64, 32, 48, CPU)(laps.append)
    assert laps == ["forward", sustained.BOTH_GRADIENTS]
    assert [gradient.shape for gradient in gradients] == [(64, 32), (48, 32)]
