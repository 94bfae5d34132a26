"""``attention: best``: the kernel that it becomes, and what the commands say of it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import trainfit
from measured_attention import TABLE, run_of
from trainfit.api.planned import planned
from trainfit.cli.main import main
from trainfit.cli.options import read_recipe
from trainfit.measurement.nvml import Nvml
from trainfit.planning.attention import choose, fastest_kernels
from trainfit.prediction.predict import predict
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.recipe import Recipe
from trainfit.sweeps import trial
from trainfit.sweeps.parts import PartRequest
from trainfit.techniques import registry

LLAMA = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
}  # fmt: skip
"""Head size 64."""
MASKED = LLAMA | {"model_type": "mistral", "sliding_window": 16}


def recipe(config: dict[str, Any] | str = LLAMA, **fields: Any) -> Recipe:
    data = {"model": {"config": config, "name": "one"}, "batch": {"seq": 64}, "attention": "best"}
    return recipe_from(data | fields)


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
def test_a_deterministic_prediction_takes_no_kernel_that_does_not_repeat() -> None:
    found = trainfit.predict("smollm-135m", gpu="h200", seq=64, attention="best", deterministic=True)
    assert found.recipe.attention not in ("best", "cudnn")


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


@pytest.mark.parametrize(
    ("head", "seq", "kernel"),
    [(32, 128, "sdpa"), (64, 2048, "triton"), (128, 2048, "sdpa"), (256, 32768, "sdpa")],
)
def test_in_fp32_it_is_ours_only_where_ours_is_measured_to_be_faster(
    head: int, seq: int, kernel: str
) -> None:
    wanted = recipe(LLAMA | {"head_dim": head}, precision="fp32", batch={"seq": seq}, recompute="full")
    assert choose(wanted).recipe.attention == kernel


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


def test_a_gpu_without_measurements_takes_those_of_its_compute_capability() -> None:
    """An H100 has the multiprocessors and kernels of an H200; an A100 and a B200 have others."""
    for gpu in ("h100-sxm", "gh200-96gb"):
        chosen = choose(recipe(hardware={"gpu": gpu}), runs=TABLE)
        assert chosen.recipe.attention == "cudnn", gpu
        assert "measured 2026-11-21 on h200" in chosen.note
    for gpu in ("a100-sxm4-80gb", "b200"):
        assert choose(recipe(hardware={"gpu": gpu}), runs=TABLE).recipe.attention == "sdpa"
    own = (*TABLE, run_of({"seconds": {"flash": 1e-3, "cudnn": 2e-3}}, gpu="h100-sxm"))
    assert choose(recipe(hardware={"gpu": "h100-sxm"}), runs=own).recipe.attention == "flash"


def test_a_plan_does_not_try_kernels_that_are_far_behind() -> None:
    """With heads of 256 PyTorch's efficient kernel takes five times as long as cuDNN's and more."""
    for head in (64, 128, 256):
        wide = recipe(LLAMA | {"head_dim": head}, hardware={"gpu": "h100-sxm"}, batch={"seq": 2048})
        assert {"cudnn", "triton"} <= set(fastest_kernels(wide))
        assert "efficient" not in fastest_kernels(wide)
        fp32: dict[int, list[str]] = {64: ["triton", "sdpa"], 128: ["sdpa", "triton"]}
        assert fastest_kernels(wide.model_copy(update={"precision": "fp32"})) == fp32.get(head, [])


def test_deterministic_algorithms_exclude_cudnn() -> None:
    """``train`` has them by default, and would fail in its first step."""
    chosen = choose(recipe(), runs=TABLE, deterministic=True)
    assert chosen.recipe.attention == "flash"
    assert "cudnn is refused: the enabled SDPA backends have no kernel for bfloat16" in chosen.note
    assert "with deterministic algorithms" in chosen.note
    assert choose(recipe(), runs=TABLE).recipe.attention == "cudnn"
