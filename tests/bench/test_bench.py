"""The experiments: their exactly known numbers, and that all run on a CPU in seconds and have a page."""

import json
import math
import time
from typing import Any

import numpy as np
import pytest
import torch

from bench_rows import CPU
from trainfit.bench.experiments import accumulation, autocast, dataloader, transformer
from trainfit.bench.harness.discovery import experiment, experiment_names
from trainfit.bench.harness.runner import run
from trainfit.measurement.environment import cpu_name
from trainfit.report.bench_plot import plot_of
from trainfit.report.bench_table import grids, reasons
from trainfit.spec.errors import InputError


@pytest.mark.parametrize("name", experiment_names())
def test_every_experiment_runs_on_a_cpu_with_its_columns_and_plots(name: str) -> None:
    one, result = experiment(name), run(name, device="cpu", form="tiny", limit_s=3600.0)
    assert result.rows
    assert {row.status for row in result.rows} <= {"done", "unsteady"}, reasons(result.rows)
    samples = [len(row.times.samples) for row in result.rows if row.times]
    assert sum(samples) < 500  # Seconds: attention takes most, 195.
    points = [json.dumps(row.point) for row in result.rows]
    assert len(points) == len(set(points))
    declared = {name for column in one.columns for name in (column.value, column.deviation)}
    plain = {"dtype", "shape", "MiB", "MB", "GB"}  # Shown under their own names.
    assert {name for row in result.rows for name in row.numbers} <= declared | plain
    for grid in grids(result.rows, one.columns):
        assert len({len(line) for line in (grid.titles, *grid.lines)}) == 1
    # A CPU has no second stream, so no gain to draw.
    assert (plot_of(result, one.plots) is not None) == (bool(one.plots) and name != "streams")


def test_unknown_experiments_and_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="accumulation"):
        run("acumulation")
    with pytest.raises(InputError, match="device"):
        run("accumulation", device="tpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InputError, match="2 CUDA devices"):
        run("accumulation", device="cuda:2")


def test_an_experiment_on_the_host_names_the_cpu_even_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with a GPU it is in full form, and no CUDA stopwatch is made, which would fail here."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    result = run("accumulation", limit_s=0)
    assert (result.form, result.environment.device, result.gpu) == ("full", cpu_name(), None)
    assert (result.environment.driver, result.settings["cpu"]) == (None, cpu_name())
    assert [name for name in experiment_names() if experiment(name).on_host] == [
        "accumulation",
        "layer_norm",
        "rounding",
    ]


def test_a_thousand_hundredths() -> None:
    sums = [accumulation.thousand_hundredths(*how) for *how, _ in accumulation.SUMS]
    assert [f"{total:.4f}" for total in sums] == ["10.0001", "9.9531", "10.0021", "10.0021"]


def test_ways_to_add_agree_with_the_exact_sum_as_theory_says() -> None:
    floats = accumulation.spread_out(3000)
    exact, unit = math.fsum(floats.astype(np.float64).tolist()), 2.0**-24
    errors = {name: abs(float(add(floats)) - exact) / exact for name, add in accumulation.METHODS.items()}
    assert errors["Kahan"] <= 2 * unit  # Kahan's bound for positive addends (Higham, 1993, section 4)
    assert errors["pairwise"] <= math.ceil(math.log2(3000)) * unit
    assert errors["Kahan"] < errors["naive"] <= 2999 * unit
    # Integers that fp32 holds are added exactly in any order.
    assert {float(add(np.arange(100, dtype=np.float32))) for add in accumulation.METHODS.values()} == {4950.0}


@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_autocast_on_a_cpu(low: str) -> None:
    dtype = autocast.LOW[low]
    found: dict[str, Any] = {
        name: tuple(autocast.operation_dtypes(operation, "cpu", dtype).values())[:2]
        for name, operation in autocast.OPERATIONS.items()
    }
    products = {"linear", "matmul", "bmm", "addmm", "conv2d", "einsum", "scaled_dot_product_attention"}
    wide = {"cross_entropy", "mse_loss", "kl_div", "binary_cross_entropy"}
    assert {found[name] for name in products} == {(low, low)}
    assert {found[name] for name in wide} == {("fp32", "fp32")}
    assert {found[name] for name in ("softmax", "layer_norm", "exp", "sum", "relu", "add")} == {("fp32", low)}
    assert autocast.component_dtypes(CPU, dtype) == {
        "weights": "fp32", "fc1": low, "relu": low, "layer norm": low, "fc2 (logits)": low,
        "loss": "fp32", "gradients": "fp32",
    }  # fmt: skip


@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_autocast_on_the_virtual_gpu_is_that_of_pytorchs_list(low: str) -> None:
    """Of every operation that the documentation's "CUDA Op-Specific Behavior" names, and no other."""
    rows = run("autocast", device="cpu", only={"device": ["virtual GPU"], "autocast": [low]}).rows
    wrong = [row.point["operation"] for row in rows if row.numbers.get("as_published") is False]
    assert not wrong
    documented = set(DOCUMENTED.split())
    listed = {
        name for name, one in autocast.OPERATIONS.items() if one.published not in ("not listed", "error")
    }
    assert documented <= listed
    of_sources = {  # In autocast_mode.h, not in the documentation.
        "einsum", "vecdot", "scaled_dot_product_attention", "rms_norm", "logsumexp", "vector_norm",
        "matrix_norm", "huber_loss", "interpolate",
    }  # fmt: skip
    assert listed == documented | of_sources


DOCUMENTED = """
    __matmul__ addbmm addmm addmv addr baddbmm bmm chain_matmul multi_dot conv1d conv2d conv3d
    conv_transpose1d conv_transpose2d conv_transpose3d GRUCell linear LSTMCell matmul mm mv prelu RNNCell
    __pow__ __rdiv__ __rpow__ __rtruediv__ acos asin binary_cross_entropy_with_logits cosh
    cosine_embedding_loss cdist cosine_similarity cross_entropy cumprod cumsum dist erfinv exp expm1
    group_norm hinge_embedding_loss kl_div l1_loss layer_norm log log_softmax log10 log1p log2
    margin_ranking_loss mse_loss multilabel_margin_loss multi_margin_loss nll_loss norm normalize pdist
    poisson_nll_loss pow prod reciprocal rsqrt sinh smooth_l1_loss soft_margin_loss softmax softmin softplus
    sum renorm tan triplet_margin_loss
    addcdiv addcmul atan2 bilinear cross dot grid_sample index_put scatter_add tensordot
"""
"""https://docs.pytorch.org/docs/stable/amp.html, read on 2026-11-27."""


def test_the_least_flops_of_a_step_are_those_of_its_linear_layers() -> None:
    layers = torch.nn.Linear(4, 8, bias=False), torch.nn.ReLU(), torch.nn.Linear(8, 2, bias=False)

    class Recipe:
        class batch:  # noqa: N801
            micro, seq = 3, 5

    recipe: Any = Recipe()
    assert transformer.least_flops(torch.nn.Sequential(*layers), recipe) == 6 * (4 * 8 + 8 * 2) * 15


def test_a_batch_costs_the_host_its_time_with_and_without_a_loader() -> None:
    at: dict[str, Any] = {"pinned": False, "workers": 0, "prefetch": 0}
    loaded = dataloader.batches_of({**at, "data": "loaded"}, (16, 8), 0.02, CPU)
    start = time.perf_counter()
    batches = [next(loaded) for _ in range(3)]
    assert time.perf_counter() - start >= 3 * 0.02
    batches += [
        next(dataloader.batches_of({**at, "data": f"on the {x}"}, (16, 8), 0.0, CPU))
        for x in ("device", "host")
    ]
    assert {batch.shape for batch in batches} == {torch.Size([16, 8])}


def test_a_loader_without_workers_makes_the_device_wait() -> None:
    only = {"workers": ["0"], "data": ["on the device", "on the host", "loaded"]}
    alone, on_the_host, first = run("dataloader", device="cpu", form="tiny", only=only).rows
    assert on_the_host.point["data"] == "on the host"
    assert alone.times is not None
    assert "waiting_share" not in alone.numbers
    assert first.times is not None
    assert first.times.median >= dataloader.STEPS["tiny"] * dataloader.PREPARE_S["tiny"]
    share = first.numbers["waiting_share"]
    assert share == pytest.approx(1 - alone.times.median / first.times.median)
    assert first.numbers["waits"] is (float(share) > dataloader.WAITS_FROM) is True
