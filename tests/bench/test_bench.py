"""The experiments: their exactly known numbers, and that all run on a CPU in seconds and have a page."""

import json
import math
import time
from typing import Any

import numpy as np
import pytest
import torch

from machine_speed import slowness
from trainfit.bench.experiments import accumulation, autocast, dataloader, transformer
from trainfit.bench.harness.discovery import experiment, experiment_names
from trainfit.bench.harness.runner import run
from trainfit.report.bench_plot import plot_of
from trainfit.report.bench_table import grids, reasons
from trainfit.spec.bench import BenchResult
from trainfit.spec.errors import InputError


@pytest.fixture(scope="module", params=experiment_names())
def tiny(request: pytest.FixtureRequest) -> BenchResult:
    return run(request.param, device="cpu", form="tiny")


def test_every_experiment_runs_on_a_cpu_in_seconds(tiny: BenchResult) -> None:
    assert tiny.rows
    assert {row.status for row in tiny.rows} <= {"done", "unsteady"}, reasons(tiny.rows)
    assert tiny.elapsed_s < 60 * slowness()
    points = [json.dumps(row.point) for row in tiny.rows]
    assert len(points) == len(set(points))


def test_every_number_has_a_declared_column_and_every_plot_something_to_draw(tiny: BenchResult) -> None:
    one = experiment(tiny.experiment)
    declared = {name for column in one.columns for name in (column.value, column.deviation)}
    plain = {"dtype", "shape", "MiB", "MB", "GB"}  # Shown under their own names.
    assert {name for row in tiny.rows for name in row.numbers} <= declared | plain
    for grid in grids(tiny.rows, one.columns):
        assert len({len(line) for line in (grid.titles, *grid.lines)}) == 1
    drawn = plot_of(tiny, one.plots)
    # A CPU has no second stream, so no gain to draw.
    assert (drawn is not None) == (bool(one.plots) and tiny.experiment != "streams")


def test_a_limit_of_no_time_leaves_rows_that_say_so() -> None:
    result = run("flash", device="cpu", form="tiny", limit_s=0)
    assert {row.status for row in result.rows} == {"not-run"}


def test_unknown_experiments_and_devices_are_refused() -> None:
    with pytest.raises(InputError, match="accumulation"):
        run("acumulation")
    with pytest.raises(InputError, match="device"):
        run("accumulation", device="tpu")


def test_a_thousand_hundredths() -> None:
    sums = [
        accumulation.thousand_hundredths(into, addend, cast) for into, addend, cast, _ in accumulation.SUMS
    ]
    assert [f"{total:.4f}" for total in sums] == ["10.0001", "9.9531", "10.0021", "10.0021"]


def test_ways_to_add_agree_with_the_exact_sum_as_theory_says() -> None:
    floats = accumulation.spread_out(3000)
    exact, unit = math.fsum(floats.astype(np.float64).tolist()), 2.0**-24
    errors = {name: abs(float(add(floats)) - exact) / exact for name, add in accumulation.METHODS.items()}
    assert errors["Kahan"] <= 2 * unit  # Kahan's bound for positive addends (Higham, 1993, section 4)
    assert errors["pairwise"] <= math.ceil(math.log2(3000)) * unit
    assert errors["naive"] <= 2999 * unit
    assert errors["Kahan"] < errors["naive"]
    # Integers that fp32 holds are added exactly in any order.
    assert {float(add(np.arange(100, dtype=np.float32))) for add in accumulation.METHODS.values()} == {4950.0}


@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_autocast_on_a_cpu(low: str) -> None:
    cpu, dtype = torch.device("cpu"), autocast.LOW[low]
    found = {
        name: tuple(autocast.operation_dtypes(operation, cpu, dtype).values())
        for name, operation in autocast.OPERATIONS.items()
    }
    assert {found[name] for name in ("linear", "matmul", "bmm", "einsum", "conv1d", "attention (SDPA)")} == {
        (low, low)
    }
    assert {found[name] for name in ("cross_entropy", "mse_loss", "add of fp32", "cat with fp32")} == {
        ("fp32", "fp32")
    }
    followers = (
        "softmax",
        "log_softmax",
        "layer_norm",
        "rms_norm",
        "exp",
        "pow",
        "rsqrt",
        "sum",
        "mean",
        "relu",
        "gelu",
        "silu",
        "tanh",
        "dropout",
        "cumsum",
        "norm",
    )
    assert {found[name] for name in followers} == {("fp32", low)}


@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_the_toy_models_loss_and_gradients_are_fp32(low: str) -> None:
    found = autocast.component_dtypes(torch.device("cpu"), autocast.LOW[low])
    assert found == {
        "weights": "fp32", "fc1": low, "relu": low, "layer norm": low, "fc2 (logits)": low,
        "loss": "fp32", "gradients": "fp32",
    }  # fmt: skip


def test_the_least_flops_of_a_step_are_below_the_models() -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8, bias=False), torch.nn.ReLU(), torch.nn.Linear(8, 2, bias=False)
    )

    class Asked:
        class batch:  # noqa: N801
            micro, seq = 3, 5

    recipe: Any = Asked()
    assert transformer.least_flops(model, recipe) == 6 * (4 * 8 + 8 * 2) * 15


def test_a_batch_costs_the_host_its_time_and_a_loader_gives_the_same_ones() -> None:
    there: dict[str, bool | int | float | str] = {
        "data": "on the device",
        "pinned": False,
        "workers": 0,
        "prefetch": 0,
    }
    cpu = torch.device("cpu")
    loaded = dataloader.batches_of({**there, "data": "loaded"}, (16, 8), 0.02, cpu)
    start = time.perf_counter()
    batches = [next(loaded) for _ in range(3)]
    assert time.perf_counter() - start >= 3 * 0.02
    assert {batch.shape for batch in batches} == {torch.Size([16, 8])}
    for where in ("on the device", "on the host"):
        assert next(dataloader.batches_of({**there, "data": where}, (16, 8), 0.0, cpu)).shape == (16, 8)


def test_a_loader_without_workers_makes_the_device_wait() -> None:
    rows = run("dataloader", device="cpu", form="tiny").rows
    alone, on_the_host, first = rows[:3]
    assert on_the_host.point["data"] == "on the host"
    assert alone.times is not None
    assert "waiting_share" not in alone.numbers
    assert first.times is not None
    assert first.times.median >= dataloader.STEPS["tiny"] * dataloader.PREPARE_S["tiny"]
    share = first.numbers["waiting_share"]
    assert share == pytest.approx(1 - alone.times.median / first.times.median)
    assert first.numbers["waits"] is (float(share) > dataloader.WAITS_FROM) is True
