"""``attention: best``: the catalog's table, its loader and writer, and the kernel that it becomes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from evidence.scripts import attention_table
from evidence.scripts.attention_table import runs_of, text_of
from trainfit.api.planned import planned
from trainfit.catalog.attention import (
    FILE,
    AttentionRate,
    AttentionRun,
    attention_runs,
    nearest,
    nearest_rate,
)
from trainfit.catalog.load import gpus
from trainfit.cli.main import main
from trainfit.cli.options import read_recipe
from trainfit.kernels.flash_attention import dispatch as flash_attention_choice
from trainfit.measurement.nvml import Nvml
from trainfit.planning.attention import COMPARED_WITH, choose
from trainfit.prediction.predict import predict
from trainfit.records import append
from trainfit.spec.bench import BenchResult, BenchRow, Environment, Spread
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.parse import parse
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.provenance import new_bench_record
from trainfit.spec.recipe import AttentionKernel, Recipe
from trainfit.sweeps import trial
from trainfit.sweeps.parts import PartRequest
from trainfit.techniques import registry

LLAMA = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
}  # fmt: skip
"""Head size 64."""
MASKED = LLAMA | {"model_type": "mistral", "sliding_window": 16}
SHAPE: dict[str, Any] = {"dtype": "bf16", "head": 64, "causal": True, "seq": 1024, "heads": 16, "batch": 8}


def run_of(*shapes: dict[str, Any], gpu: str = "h200") -> AttentionRun:
    row = {"gpu": gpu, "measured_at": "2026-11-21T15:00:00+00:00", "torch": "2.11", "experiment": "flash"}
    return parse(AttentionRun, {**row, "shapes": [SHAPE | shape for shape in shapes]})


TABLE = (
    run_of(
        {"seconds": {"flash": 3e-3, "cudnn": 1.5e-3, "sdpa": 3.1e-3}},
        {"seq": 8192, "seconds": {"flash": 1e-3, "cudnn": 2e-3}},
    ),
)


def recipe(config: dict[str, Any] | str = LLAMA, **fields: Any) -> Recipe:
    data = {"model": {"config": config, "name": "one"}, "batch": {"seq": 64}, "attention": "best"}
    return recipe_from(data | fields)


# -- the choice ----------------------------------------------------------------------------------------------


def test_the_fastest_kernel_at_the_nearest_length_is_chosen_and_told() -> None:
    short, long = choose(recipe(), runs=TABLE), choose(recipe(batch={"seq": 8000}), runs=TABLE)
    assert (short.recipe.attention, long.recipe.attention) == ("cudnn", "flash")
    assert short.note == (
        "attention: best -> cudnn (2.00 x flash at 1024, the measured length nearest to 64, "
        "measured 2026-11-21 on h200 with torch 2.11)"
    )
    assert choose(recipe(batch={"seq": 8192}), runs=TABLE).note.startswith(
        "attention: best -> flash (2.00 x cudnn at 8192, measured"
    )
    assert short.recipe == recipe(attention="cudnn")
    assert short.recipe.id == recipe(attention="cudnn").id != recipe().id


NOT_MEASURED: dict[str, dict[str, Any]] = {
    "nothing is measured on a100-sxm4-80gb for bf16 and head size 64": {
        "hardware": {"gpu": "a100-sxm4-80gb"}
    },
    "nothing is measured on h200 for fp32 and head size 64": {"precision": "fp32"},
    "nothing is measured on a CPU": {"hardware": {"gpu": "cpu"}},
    "nothing is measured on h200 for bf16 and head size 32": {"config": LLAMA | {"head_dim": 32}},
    "the head size of this model is not known": {"config": LLAMA | {"model_type": "mamba"}},
}


@pytest.mark.parametrize("why", NOT_MEASURED)
def test_what_is_not_measured_is_left_to_pytorch_and_said(why: str) -> None:
    chosen = choose(recipe(**NOT_MEASURED[why]), runs=TABLE)
    assert chosen.recipe.attention == "sdpa"
    assert chosen.note.startswith(f"attention: best -> sdpa ({why}")
    assert chosen.note.endswith(", so PyTorch chooses)")


def test_a_device_that_runs_it_counts_and_not_the_recipes_gpu() -> None:
    assert choose(recipe(), device_type="cpu", runs=TABLE).recipe.attention == "sdpa"
    elsewhere = recipe(hardware={"gpu": "a100-sxm4-80gb"})
    assert choose(elsewhere, gpu="h200", runs=TABLE).recipe == elsewhere.model_copy(
        update={"attention": "cudnn"}
    )
    assert "on Some GPU for" in choose(recipe(), gpu="Some GPU", runs=TABLE).note


def test_a_kernel_that_is_not_right_for_the_model_is_passed_over() -> None:
    """Flash attention takes no mask, which a sliding window is; efficient attention no grouped heads."""
    table = (run_of({"seconds": {"flash": 1e-3, "cudnn": 2e-3}}),)
    chosen = choose(recipe(MASKED), runs=table)
    assert chosen.recipe.attention == "cudnn"
    assert "0.50 x flash" in chosen.note
    refused = "flash is refused: the enabled SDPA backends have no kernel for bfloat16, head size 64, a mask"
    assert f"{refused}; the times are of plain causal attention)" in chosen.note
    prefix = recipe(adapter={"kind": "prefix"})  # Refused by a check of the recipe, without a trace.
    assert choose(prefix, runs=table).recipe.attention == "cudnn"
    grouped = (run_of({"seconds": {"efficient": 1e-3, "flash": 2e-3}}),)
    assert choose(recipe(), runs=grouped).recipe.attention == "flash"
    nothing = (run_of({"seconds": {"flash": 1e-3, "triton": 2e-3}}),)
    assert choose(recipe(MASKED), runs=nothing).recipe.attention == "sdpa"


def test_equal_refusals_are_told_once() -> None:
    """Bloom's ALiBi is in the scores, so transformers has no SDPA form of it."""
    bloom = choose(recipe("bloom-560m"), runs=(run_of({"seconds": {"flash": 1e-3, "cudnn": 2e-3}}),))
    assert bloom.recipe.attention == "sdpa"
    assert bloom.note.startswith("attention: best -> sdpa (PyTorch chooses; flash and cudnn are refused: ")


def test_attention_of_another_kind_than_the_measured_is_left_to_pytorch() -> None:
    """Gemma 2 caps its scores; DeepSeek's values are smaller than its heads."""
    seconds = {"seconds": {"flash": 1e-3, "cudnn": 2e-3}}
    table = (run_of({"head": 256, **seconds}, {"head": 192, **seconds}),)
    found = {name: choose(recipe(name), runs=table) for name in ("gemma-2-2b", "deepseek-v2-lite")}
    assert {choice.recipe.attention for choice in found.values()} == {"sdpa"}
    assert "nothing is measured for capped scores" in found["gemma-2-2b"].note
    assert "for heads of 192 with values of 128, so PyTorch chooses" in found["deepseek-v2-lite"].note


def test_a_step_is_only_built_of_a_chosen_kernel() -> None:
    with pytest.raises(InputError, match=r"attention = 'best': .*trainfit\.planning\.attention\.choose"):
        registry.check(recipe())
    registry.check(recipe().without_open_fields())


# -- the commands --------------------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainfit.planning.attention.attention_runs", lambda: TABLE)


@pytest.mark.usefixtures("measured")
def test_predict_says_what_best_became(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["hardware.gpu=h200", "batch.seq=64"]
    best, cudnn = [*settings, "attention=best"], [*settings, "attention=cudnn"]
    assert main(["predict", "smollm-135m", *(word for one in best for word in ("--set", one))]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "cudnn attention" in out
    assert "attention: best -> cudnn (2.00 x flash at 1024, the measured length nearest to 64" in out
    built, remark = planned(read_recipe("smollm-135m", best))
    assert built == read_recipe("smollm-135m", cudnn)
    assert len(remark) == 1


@pytest.mark.usefixtures("measured")
def test_a_real_cpu_leaves_it_to_pytorch() -> None:
    built, (remark,) = planned(read_recipe("tiny-cpu", ["attention=best"]), "cpu")
    assert built == read_recipe("tiny-cpu", ["attention=sdpa"])
    assert remark == "attention: best -> sdpa (nothing is measured on a CPU, so PyTorch chooses)"


@pytest.mark.usefixtures("measured")
def test_a_sweep_predicts_and_keeps_what_best_became(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # The trial sets it, in a process of its own.
    request = PartRequest(part="predict", variant="one", recipe=recipe(), device="auto", timeout_s=60.0)
    found = trial._predict(request)
    assert found.planned == recipe(attention="cudnn")
    assert found.estimate is not None
    assert found.estimate.recipe_id == recipe(attention="cudnn").id
    assert any(line.startswith("attention: best -> cudnn") for line in found.estimate.assumptions)
    on_cpu = trial._predict(request.model_copy(update={"device": "cpu"}))
    assert on_cpu.planned == recipe(attention="sdpa")


def test_of_kernels_as_fast_as_each_other_the_smaller_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of their medians is chance; the predicted peak is not."""
    near = {"spread": {"triton": 0.02, "cudnn": 0.02}}
    ours_first = (run_of({"seconds": {"triton": 1e-3, "cudnn": 1.01e-3, "flash": 1.02e-3}, **near}),)
    cudnn_first = (run_of({"seconds": {"triton": 1.01e-3, "cudnn": 1e-3, "flash": 1.02e-3}, **near}),)
    apart = (run_of({"seconds": {"triton": 1e-3, "cudnn": 1.03e-3}, **near}),)
    first, second = choose(recipe(), runs=ours_first), choose(recipe(), runs=cudnn_first)
    peaks = {name: predict(recipe(attention=name)).peak_allocated_bytes for name in ("triton", "cudnn")}
    assert first.recipe == second.recipe
    assert peaks[first.recipe.attention] == min(peaks.values())
    assert "within the spread of the measurements" in first.note
    assert choose(recipe(), runs=apart).recipe.attention == "triton"
    sizes = iter((5, 7, 7, 5))
    monkeypatch.setattr(
        "trainfit.planning.attention.replay_on",
        lambda *_: (SimpleNamespace(peak_allocated_bytes=next(sizes)), True),
    )
    chosen = [choose(recipe(), runs=runs).recipe.attention for runs in (ours_first, ours_first)]
    assert chosen == ["triton", "cudnn"]


@pytest.mark.parametrize(("head", "seq"), [(32, 128), (64, 32768), (128, 2048), (256, 32768)])
def test_in_fp32_it_is_never_ours_where_ours_is_slower(head: int, seq: int) -> None:
    wanted = recipe(LLAMA | {"head_dim": head}, precision="fp32", batch={"seq": seq}, recompute="full")
    assert choose(wanted).recipe.attention == "sdpa"


# -- the table -----------------------------------------------------------------------------------------------


def test_the_shipped_table_is_read_and_its_gpus_are_the_catalogs() -> None:
    assert {run.gpu for run in attention_runs()} <= set(gpus())
    assert text_of(attention_runs()) == FILE.read_text()


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('gpu = "h200"', 'gpu = "h9000"', "h9000"),
        ('measured_at = "2026"', "measured_at = 1", "measured_at"),
        (", cudnn = 2.0 }", " }", "seconds"),
        ("cudnn = 2.0", "cudnn = 0.0", "seconds"),
        ("cudnn = 2.0", "flush = 2.0", "seconds"),
        ("shapes = [", "shapes = [SHAPE,", "measured twice"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused(tmp_path: Path, old: str, new: str, why: str) -> None:
    shape = (
        '{ dtype = "bf16", head = 64, causal = true, seq = 1024, heads = 16, batch = 8, '
        "seconds = { flash = 1.0, cudnn = 2.0 } }"
    )
    good = (
        '[[run]]\ngpu = "h200"\nmeasured_at = "2026"\ntorch = "2"\nexperiment = "flash"\n'
        f"shapes = [\n{shape}]\n"
    )
    path, bad = tmp_path / "attention.toml", tmp_path / "bad.toml"
    path.write_text(good)
    assert attention_runs(path)[0].shapes[0].seconds == {"flash": 1.0, "cudnn": 2.0}
    bad.write_text(good.replace(old, new.replace("SHAPE", shape)))
    with pytest.raises(InputError, match=why):
        attention_runs(bad)


def test_the_nearest_length_is_by_ratio_and_never_of_another_kind() -> None:
    found = nearest(TABLE, gpu="h200", dtype="bf16", head=64, seq=3000)
    assert found is not None
    assert found.shape.seq == 8192  # 2.7 times 3000; 1024 is 2.9 times less.
    wanted: dict[str, Any] = {"gpu": "h200", "dtype": "bf16", "head": 64, "seq": 1024}
    assert nearest(TABLE, **wanted) is not None
    others: list[dict[str, Any]] = [{"gpu": "h100-sxm"}, {"dtype": "fp32"}, {"head": 128}, {"causal": False}]
    assert [nearest(TABLE, **(wanted | other)) for other in others] == [None] * 4


# -- the writer ----------------------------------------------------------------------------------------------


def row(body: str, seconds: float, which: str = "both", samples: int = 6, **point: Any) -> BenchRow:
    at = SHAPE | {"body": body, "pass": which} | point
    return BenchRow(point=at, status="unsteady", times=Spread.of([seconds] * samples))


def passes(body: str, seconds: float = 1e-3, **point: Any) -> list[BenchRow]:
    return [row(body, seconds, "forward", **point), row(body, 3 * seconds, "backward", **point)]


def record(*rows: BenchRow, at: str = "2026-11-21T15:00:00", **fields: Any) -> Any:
    where = Environment(device="NVIDIA H200", device_bytes=1, torch="2.11", python="3", platform="x")
    known: dict[str, Any] = {"experiment": "flash", "form": "full", "gpu": "h200"}
    result = BenchResult(**(known | fields), rows=rows, environment=where, limit_s=1.0, elapsed_s=1.0)
    return new_bench_record(result).model_copy(update={"created_at": at})


def test_the_table_is_written_from_records_and_read_again(tmp_path: Path) -> None:
    file, into = tmp_path / "records.sqlite", tmp_path / "attention.toml"
    throttled = BenchRow(
        point=SHAPE | {"body": "cudnn", "pass": "both", "seq": 512}, status="throttled", message="hot"
    )
    append(file, record(
        row("flash", 3e-3), row("ours", 1e-3), row("ours", 1e-9, "forward"), row("flex", 1e-9),
        row("pytorch", 7e-9, heads=1), row("ours", 1e-9, heads=1),  # One head leaves the GPU idle.
        row("flash", 3e-9, seq=2048, heads=1), row("ours", 1e-9, seq=2048, heads=1),
        row("flash", 3e-9, seq=4096), row("ours", 1e-9, seq=4096, samples=5),  # Too few samples.
        row("flash", 1.0, seq=512), throttled, row("flash", 1.0, seq=128),  # Nothing to compare with.
    ))  # fmt: skip
    assert attention_table.main([str(file), "--into", str(into)]) == 0
    (run,) = attention_runs(into)
    (shape,) = run.shapes
    assert shape.seconds == {"flash": 3e-3, "triton": 1e-3}
    assert (run.gpu, run.measured_at, run.torch) == ("h200", "2026-11-21T15:00:00", "2.11")
    assert text_of([run]) == into.read_text()


def test_the_newest_record_of_a_shape_counts_and_only_as_a_whole() -> None:
    old = record(
        row("flash", 3e-3), row("ours", 1e-3), row("flash", 1e-3, seq=512), row("ours", 2e-3, seq=512)
    )
    new = record(row("flash", 5e-3), row("cudnn", 4e-3), at="2026-11-22T15:00:00")
    first, second = runs_of([new, old])
    assert [(shape.seq, shape.seconds) for shape in first.shapes] == [(512, {"flash": 1e-3, "triton": 2e-3})]
    assert [(shape.seq, shape.seconds) for shape in second.shapes] == [(1024, {"flash": 5e-3, "cudnn": 4e-3})]
    fewer = record(
        row("flash", 9e-3), row("ours", 8e-3), row("cudnn", 7e-3, samples=5), at="2026-11-23T15:00:00"
    )
    whole = record(row("flash", 3e-3), row("ours", 1e-3), row("cudnn", 2e-3))
    (run,) = runs_of([whole, fewer])  # The later one had no time for cuDNN.
    assert run.shapes[0].seconds == {"flash": 3e-3, "triton": 1e-3, "cudnn": 2e-3}


def test_one_head_takes_the_place_of_nothing_and_of_no_more_heads() -> None:
    most = record(row("flash", 3e-3, seq=65536), row("ours", 1e-3, seq=65536))
    one: dict[str, Any] = {"heads": 1, "batch": 1, "seq": 65536}
    fewer = record(
        row("flash", 9e-4, **one), row("ours", 8e-4, **one), row("ours", 7e-4, head=32, **one),
        row("pytorch", 6e-4, head=32, **one), at="2026-11-22T15:00:00",
    )  # fmt: skip
    first, second = runs_of([most, fewer])
    assert [(shape.head, shape.heads) for shape in first.shapes] == [(64, 16)]
    assert [(shape.head, shape.heads, shape.seconds) for shape in second.shapes] == [
        (32, 1, {"triton": 7e-4, "sdpa": 6e-4})
    ]


def test_the_writer_knows_where_the_plain_kernels_do_not_run() -> None:
    assert attention_table.HOPPER == flash_attention_choice.HOPPER
    assert set(attention_table.GLUON_HEADS) == set(flash_attention_choice.FORWARD)
    assert set(COMPARED_WITH) == set(get_args(AttentionKernel))


def test_rates_are_of_the_kernel_that_ran_and_of_the_most_heads() -> None:
    one = record(
        row("ours", 1.0), *passes("ours"), *passes("ours", dtype="fp32"), *passes("ours", head=32),
        *passes("pytorch"), *passes("pytorch", dtype="fp32"), *passes("flash", seq=65536, heads=1, batch=1),
        *passes("flash", seq=65536), *passes("flex"), *passes("plain", seq=64),
        *passes("plain", causal=False), row("plain", 1e-3, "forward"), row("flash", 1.0),
    )  # fmt: skip
    (run,) = runs_of([one])
    found = {(rate.kernel, rate.dtype, rate.head, rate.seq): rate for rate in run.rates}
    assert set(found) == {
        ("gluon", "bf16", 64, 1024), ("plain", "fp32", 64, 1024), ("plain", "bf16", 32, 1024),
        ("cudnn", "bf16", 64, 1024), ("efficient", "fp32", 64, 1024), ("flash", "bf16", 64, 65536),
    }  # fmt: skip
    assert found["flash", "bf16", 64, 65536].heads == 16
    gluon, plain = found["gluon", "bf16", 64, 1024], found["plain", "fp32", 64, 1024]
    pairs = 8 * 16 * 1024 * 1025 / 2
    assert gluon.flops_per_s(backward=False) == plain.flops_per_s(backward=False) == 4 * 64 * pairs / 1e-3
    assert gluon.flops_per_s(backward=True) == pytest.approx(5 * 2 * 64 * pairs / 3e-3)
    assert plain.flops_per_s(backward=True) == pytest.approx(7 * 2 * 64 * pairs / 3e-3)
    assert attention_table.text_of([run]).count("kernel = ") == 6


def test_rates_with_a_mask_are_rates_of_their_own(tmp_path: Path) -> None:
    """The kernel gets an additive mask; a boolean one is first converted by an operation of its own."""
    file, into = tmp_path / "records.sqlite", tmp_path / "attention.toml"
    additive: dict[str, Any] = {"causal": False, "mask": "additive"}
    append(file, record(
        row("flash", 3e-3), row("cudnn", 1e-3), *passes("cudnn"), *passes("cudnn", 2e-3, **additive),
        *passes("cudnn", 5e-3, causal=False, mask="boolean"), row("cudnn", 8e-3, **additive),
        row("efficient", 9e-3, **additive), *passes("cudnn", 4e-3, head=256, mask="none"),
    ))  # fmt: skip
    assert attention_table.main([str(file), "--into", str(into)]) == 0
    (run,) = attention_runs(into)
    assert len(run.shapes) == 1  # What ``attention: best`` chooses by is of causal attention alone.
    found = {(rate.head, rate.masked): (rate.forward, rate.backward, rate.causal) for rate in run.rates}
    assert found == {
        (64, False): (1e-3, pytest.approx(3e-3), True),
        (64, True): (2e-3, pytest.approx(6e-3), False),
        (256, False): (4e-3, pytest.approx(12e-3), True),
    }
    assert into.read_text().count("masked = true") == 1
    assert text_of(attention_runs(into)) == into.read_text()
    wanted: dict[str, Any] = {"gpu": "h200", "kernel": "cudnn", "dtype": "bf16", "head": 200, "seq": 1024}
    plain, masked = (nearest_rate([run], masked=which, **wanted) for which in (False, True))
    assert (plain and plain.head, masked and masked.head) == (256, 64)
    wanted["dtype"] = "fp32"
    assert nearest_rate([run], masked=True, **wanted) is None
    assert masked is not None
    assert masked.flops_per_s(backward=False) == pytest.approx(4 * 64 * 8 * 16 * 1024**2 / 2e-3)


def test_records_without_such_rows_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = (row("flash", 3e-3), row("ours", 1e-3))
    for useless in (record(*rows, form="tiny"), record(*rows, gpu=None), record(rows[0])):
        with pytest.raises(InputError, match="trainfit bench flash"):
            runs_of([useless])
    assert attention_table.main([str(tmp_path / "nothing.jsonl")]) == 65
    assert "nothing.jsonl" in capsys.readouterr().err
    rate: dict[str, Any] = {**SHAPE, "kernel": "cudnn", "forward": 1e-3, "backward": 1e-3, "masked": True}
    with pytest.raises(InputError, match="SDPA takes one of them"):
        parse(AttentionRate, rate)


def test_a_gpu_that_is_not_named_takes_no_other_gpus_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without NVIDIA's library the recipe's own GPU, which is measured, says nothing of this one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Nvml, "name", lambda self: None)
    wanted = recipe_from(
        {"model": {"config": LLAMA}, "attention": "best", "precision": "bf16", "hardware": {"gpu": "h200"}}
    )
    built, (remark,) = planned(wanted, "cuda")
    assert built.attention == "sdpa"
    assert "nothing is measured on this GPU, whose name NVML does not report" in remark


@pytest.mark.parametrize("device", ["cuda:x", "tpu"])
def test_a_device_of_no_such_form_is_one_line(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure", "tiny-cpu", "--set", "attention=best", "--device", device]) == 65
    (line,) = capsys.readouterr().err.splitlines()
    assert f"device = {device}" in line.replace("'", "")
