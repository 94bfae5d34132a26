"""Calibration: rows as the ledger describes operations, failures that stop nothing, a file always whole."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from trainfit.bench.harness.stopwatch import CpuStopwatch
from trainfit.calibration import run as run_module
from trainfit.calibration import workloads as workloads_module
from trainfit.calibration.host import quick_steps, small_steps
from trainfit.calibration.op_timer import ISSUE_SHARE, LEAST_RUNS, LOAD_S, MOST_RUNS, OpTimer
from trainfit.calibration.run import Run
from trainfit.calibration.workloads import one_step, recipes, tiny_recipe
from trainfit.catalog.load import gpu
from trainfit.cli.main import main
from trainfit.prediction.predict import ledger_of
from trainfit.spec.calibration import Calibration
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.units import GIB
from trainfit.techniques.registry import check
from trainfit.virtual.cuda.op_layout import layout, product_shape

aten = torch.ops.aten


def test_the_rows_of_a_step_are_the_entries_of_its_ledger() -> None:
    timer = OpTimer(CpuStopwatch(), None, lambda: False)
    with timer:
        one_step(tiny_recipe(), torch.device("cpu"))
    timer.finish()
    assert not timer.failures
    ledger = ledger_of(tiny_recipe(), use_cache=False)
    wanted = {(op.name, op.layout, op.shape, op.num_bytes) for op in ledger.steady_ops if op.causal_flops}
    assert wanted <= {(row.op, row.layout, row.shape, row.num_bytes) for row in timer.rows}
    assert all(row.seconds > 0 for row in timer.rows)


def test_an_operation_in_place_is_timed_on_copies_and_equal_calls_once() -> None:
    timer = OpTimer(CpuStopwatch(), None, lambda: False)
    x = torch.ones(64)
    with timer:
        x.add_(1.0)
        x.add_(1.0)
        x.view(8, 8)
    timer.finish()
    assert x.tolist() == [3.0] * 64
    assert [(row.op, row.num_bytes) for row in timer.rows] == [("aten.add_.Tensor", 512)]


def test_no_more_runs_are_issued_than_the_products_before_them_last() -> None:
    """Else an operation that the host launches slowly would be timed by the host's speed."""
    timer = OpTimer(CpuStopwatch(), None, lambda: False)
    timer.gpu = gpu("h200")  # By whose rates each addition takes microseconds; here it takes a millisecond.
    x = torch.ones(2**22)
    with timer:
        x.add(1.0)
    (issued,) = timer._pending
    assert LEAST_RUNS <= issued.runs < MOST_RUNS
    timer.finish()
    (row,) = timer.rows
    assert row.seconds > ISSUE_SHARE * LOAD_S / MOST_RUNS


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("func", "args", "expected"),
    [
        (aten.add.Tensor, (ones(4, 8), ones(4, 8)), ""),
        (aten.add.Tensor, (ones(4, 8), ones(8)), "broadcast"),
        (aten.add.Tensor, (ones(4, 8), ones(8, 4).t()), "strided"),
        (aten.clone.default, (ones(4, 16)[:, :8],), "strided"),
        (aten.mul.Tensor, (ones(4, 8), ones(4, 8, dtype=torch.bfloat16)), "mixed"),
        (aten.sum.dim_IntList, (ones(4, 8), [0]), "outer"),
        (aten.sum.dim_IntList, (ones(4, 8), [1]), ""),
        (aten.mm.default, (ones(4, 8), ones(16, 8).t()), "nt"),
    ],
)
def test_layouts(func: object, args: tuple[object, ...], expected: str) -> None:
    assert layout(func, args, func(*args)) == expected  # pyright: ignore[reportCallIssue]


def test_a_products_shape() -> None:
    assert product_shape(aten.bmm.default, (ones(3, 4, 8), ones(3, 8, 5))) == (3, 4, 5, 8)
    assert product_shape(aten.add.Tensor, (ones(4, 8), ones(4, 8))) == ()


def test_every_part_has_a_result_or_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> float:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(
        run_module, "costs", lambda device, compiled: [("a call", broken), ("another", lambda: 1e-6)]
    )
    out = tmp_path / "calibration.json"
    run = Run(torch.device("cpu"), host_only=True, limit_s=60, say=lambda line: None, out=out)
    run.run()
    kept = Calibration.model_validate_json(out.read_text())
    assert kept.host == {"another": 1e-6}
    assert kept.failures == ("host, a call: RuntimeError: no such kernel",)


def test_a_file_that_is_no_calibration_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "costs", lambda device, compiled: [("a call", lambda: 1e-6)])
    out = tmp_path / "recipe.yaml"
    arguments = ["calibrate", "--host", "--device", "cpu", "--out", str(out)]
    for content in ("model: {config: gpt2}\n", "", '{"format": 1}'):
        out.write_text(content)
        assert main(arguments) == 65
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "--out" in error and "move it away" in error  # noqa: PT018
        assert out.read_text() == content
    assert main([*arguments[:-1], str(tmp_path)]) == 65
    out.unlink()
    assert main(arguments) == 0
    assert main(arguments) == 0  # A calibration is replaced by a newer one.
    assert Calibration.model_validate_json(out.read_text()).host == {"a call": 1e-6}


def test_every_recipe_of_the_calibration_is_allowed() -> None:
    for _, data in recipes():
        check(recipe_from(data))


def test_the_hosts_own_calibration_takes_plain_eager_steps_alone() -> None:
    assert len(list(quick_steps())) == 9
    assert all(step in list(small_steps()) for step in quick_steps())


@pytest.mark.parametrize(("memory_gib", "share"), [(139.8, 1.0), (69.5, 0.5), (1.0, 0.0)])
def test_large_steps_have_smaller_batches_on_smaller_gpus(
    monkeypatch: pytest.MonkeyPatch, memory_gib: float, share: float
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    total = SimpleNamespace(total_memory=int(memory_gib * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: total)
    taken: list[int] = []
    monkeypatch.setattr(workloads_module, "one_step", lambda recipe, device: taken.append(recipe.batch.micro))
    for name, work in workloads_module.workloads(torch.device("cpu"), tiny=False):
        if name.startswith("large model"):
            work()
    most = [micro for _, micro, _, _ in workloads_module.LARGE]
    assert taken == [max(1, int(share * micro)) for micro in most]
    assert all(1 <= one <= of for one, of in zip(taken, most, strict=True))
    assert (sum(taken) < sum(most)) == (share < 1)
