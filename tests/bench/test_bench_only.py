"""``--only`` and a limit of no time: what is not selected is not built, in any experiment."""

from typing import Any

import pytest

from trainfit.bench.experiments import accumulation, autocast, kernels, memory, transformer
from trainfit.bench.harness import bench as harness
from trainfit.bench.harness import runner
from trainfit.bench.harness.bench import cell_name
from trainfit.bench.harness.discovery import experiment_names
from trainfit.bench.harness.runner import run
from trainfit.spec.errors import InputError

WATCHED = (
    (harness, "take"), (kernels, "assemble"), (memory, "assemble"), (transformer, "assemble"),
    (memory, "predict_memory"), (autocast, "operation_dtypes"), (autocast, "component_dtypes"),
    (accumulation, "thousand_hundredths"), (accumulation, "spread_out"),
)  # fmt: skip


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record everything that is built, timed or found."""
    calls: list[str] = []

    def watched(name: str, real: Any) -> Any:
        return lambda *a, **k: (calls.append(name), real(*a, **k))[1]

    for module, name in WATCHED:
        monkeypatch.setattr(module, name, watched(name, getattr(module, name)))
    monkeypatch.setattr(kernels, "_profiled", lambda *_: ("failed", "takes seconds, and is no part of this"))
    return calls


@pytest.mark.parametrize("name", experiment_names())
def test_with_no_time_nothing_is_built_and_every_point_is_not_run(name: str, built: list[str]) -> None:
    for form in ("tiny", "full"):
        rows = run(name, device="cpu", form=form, limit_s=0).rows
        assert {row.status for row in rows if "property" not in row.point} == {"not-run"}
    assert built == []


SELECTED: list[tuple[str, dict[str, list[str]], list[str]]] = [
    ("kernels", {"precision": ["amp-bf16"], "context": ["64"], "pass": ["forward"]}, ["assemble", "take"]),
    ("transformer", {"warm-up": ["5", "0"], "precision": ["bf16"]}, ["assemble", "take"]),
    ("memory", {"source": ["predicted"], "precision": ["fp32"]}, ["predict_memory"]),
    ("memory", {"source": ["measured"], "pass": ["forward only"], "precision": ["fp32"]}, ["assemble"]),
    ("attention", {"body": ["ours"], "seq": ["128"], "pass": ["backward"]}, ["take"]),
    ("flash", {"heads": ["1"], "seq": ["100"], "body": ["pytorch"], "pass": ["both"]}, ["take"]),
    ("fusion", {"body": ["eager"]}, ["take"] * 2),  # Its share of a copy needs the copy's time.
    ("streams", {"case": ["softmaxes of few rows"], "streams": ["one"]}, ["take"]),
    ("streams", {"size": ["64"]}, ["take"] * 3),
    # Waits need the time of the step alone.
    ("dataloader", {"workers": ["0"], "data": ["loaded"]}, ["take"] * 2),
    ("autocast", {"operation": ["sum"], "autocast": ["bf16"]}, ["operation_dtypes"] * 2),
    ("autocast", {"component": ["loss"], "autocast": ["bf16"]}, ["component_dtypes"]),
    ("accumulation", {"sum": ["fp16"]}, ["thousand_hundredths"]),
    ("accumulation", {"method": ["Kahan"]}, ["take", "spread_out"]),
    ("gpu", {"cache": ["warm"], "copied_mib": ["4", "0.25"]}, ["take"] * 2),
    # A level repeats the latency of the nearest set.
    ("gpu", {"level": ["caches and memory"], "set_kib": ["64"]}, ["take"] * 2),
    ("gpu", {"chase": ["CPU memory"], "set_kib": ["16"]}, ["take"]),
    ("dataloader", {"tokenised": ["before"], "read from": ["memory"], "workers": ["1"]}, ["take"] * 2),
]


@pytest.mark.parametrize(
    ("name", "only", "expected"), SELECTED, ids=lambda case: "" if isinstance(case, list) else str(case)
)
def test_only_what_is_selected_is_built(
    name: str, only: dict[str, list[str]], expected: list[str], built: list[str]
) -> None:
    rows: list[Any] = []
    result = run(name, device="cpu", form="tiny", only=only, on_row=rows.append)
    assert result.rows
    assert list(result.rows) == rows
    for row in result.rows:
        assert row.status in ("done", "unsteady"), row.message
        assert all(cell_name(row.point[key]) in values for key, values in only.items())
    assert sorted(built) == sorted(expected)
    numbers = {name for row in result.rows for name in row.numbers}
    assert {"fusion": "of_a_copy", "dataloader": "waiting_share"}.get(name) in {*numbers, None}


def test_a_value_with_commas_is_selected_as_it_is_written() -> None:
    known = ["copy, pageable, then products", "copy", "products", "copy, then"]
    found = runner._joined(["products", "copy", "pageable", "then products", "copy"], known)
    assert found == ["products", "copy, pageable, then products", "copy"]
    assert runner._joined(["copy", "then", "other"], known) == ["copy, then", "other"]
    only = {"case": ["copy to the host", "pageable", "then products"], "streams": ["one"]}
    rows = runner.run("streams", device="cpu", form="tiny", only=only, limit_s=0).rows
    assert {row.point["case"] for row in rows} == {"copy to the host, pageable, then products"}


def test_unknown_keys_and_values_are_refused_with_the_known_ones() -> None:
    for wrong, known in (({"cash": ["warm"]}, "cache"), ({"cache": ["hot"]}, "cold, warm")):
        with pytest.raises(InputError, match=known):
            run("gpu", device="cpu", form="tiny", only=wrong)
