"""``bench soft_prompts``: the task has a known floor, and layers learn it faster."""

import math
from typing import Any

import pytest
import torch

from trainfit.bench.experiments import soft_prompts as experiment
from trainfit.bench.harness.bench import Bench
from trainfit.bench.harness.runner import RULES, run
from trainfit.bench.harness.stopwatch import CpuStopwatch
from trainfit.catalog.load import gpu
from trainfit.prediction.predict import predict
from trainfit.spec.bench import BenchRow
from trainfit.spec.recipe import Recipe
from trainfit.step import Step, assemble

TINY, CPU = experiment.TINY, torch.device("cpu")


@pytest.fixture(scope="module")
def rows() -> tuple[BenchRow, ...]:
    return run("soft_prompts", device="cpu", form="tiny").rows


def losses(rows: tuple[BenchRow, ...], adapter: str) -> list[float]:
    at = {"part": "training", "adapter": adapter}
    return [float(row.numbers["loss"]) for row in rows if at.items() <= row.point.items()]


def test_layers_learn_faster_than_the_tokens_alone(rows: tuple[BenchRow, ...]) -> None:
    at = 8 * experiment.NUM_POINTS // TINY.steps - 1
    assert losses(rows, "prefix, mlp")[at] < losses(rows, "prefix")[at] - 0.1
    assert losses(rows, "p-tuning, mlp")[at] < losses(rows, "prompt")[at] - 0.1
    assert losses(rows, "p-tuning, lstm")[at] < losses(rows, "prompt")[at] - 0.1


def test_what_is_kept_does_not_depend_on_the_layers(rows: tuple[BenchRow, ...]) -> None:
    found = {str(row.point["adapter"]): row.numbers for row in rows if row.point["part"] == "size"}
    kept = {name: numbers["kept_params"] for name, numbers in found.items()}
    assert kept["prompt"] == kept["p-tuning, mlp"] == kept["p-tuning, lstm"] == TINY.tokens * TINY.hidden
    keys = TINY.hidden // 2
    assert kept["prefix"] == kept["prefix, mlp"] == 2 * TINY.tokens * TINY.layers * keys
    assert found["prompt"]["trained_params"] == kept["prompt"]
    assert found["prefix"]["trained_params"] == kept["prefix"]
    lstm, mlp = (float(found[f"p-tuning, {name}"]["trained_params"]) for name in ("lstm", "mlp"))
    assert lstm > mlp > float(kept["prompt"])


def test_the_bound_is_the_entropy_of_the_next_token() -> None:
    """Of drawn sequences: the share of followed rules, and the entropy of what replaces them."""
    batch = experiment.batch_of(TINY._replace(micro=4096), 3, experiment.RULE, CPU)
    ids = batch["input_ids"]
    counts = torch.zeros(TINY.vocabulary, TINY.vocabulary)
    pairs = torch.stack((ids[:, :-1].flatten(), ids[:, 1:].flatten()))
    counts.index_put_((pairs[0], pairs[1]), torch.ones(pairs.shape[1]), accumulate=True)
    share = counts / counts.sum(1, keepdim=True)
    entropy = -(counts / counts.sum() * share.clamp(min=1e-9).log()).sum()
    assert float(entropy) == pytest.approx(experiment.bound(TINY), rel=0.02)
    assert experiment.bound(TINY) < math.log(TINY.vocabulary)


def test_a_peak_is_of_its_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what other rows hold, and with the workspaces that cuBLAS allocates again for it."""
    done: list[str] = []
    bytes_of = {"held": 1000, "now": 1000, "peak": 9999}

    def clear() -> None:
        done.append("clear")
        bytes_of["now"] = bytes_of["held"]

    def reset(device: torch.device) -> None:
        done.append("reset")
        bytes_of["peak"] = bytes_of["now"]

    class Recorded(Step):
        def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            bytes_of["now"] += 64 if done[-1] == "clear" else 0  # Workspaces and moments
            done.append("step")
            bytes_of["peak"] = max(bytes_of["peak"], bytes_of["now"] + 300)
            return super().__call__(*args, **kwargs)

    def assembled(recipe: Recipe, device: torch.device) -> Step:
        step = assemble(recipe, CPU)
        step.__class__ = Recorded
        return step

    monkeypatch.setattr(experiment, "assemble", assembled)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", clear, raising=False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: bytes_of["now"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: bytes_of["peak"])
    card = gpu("h100-sxm")
    bench = Bench(torch.device("cuda"), "tiny", CpuStopwatch(), card, RULES["tiny"], math.inf)
    for one in experiment.KINDS[:2]:
        done.clear()
        recipe = experiment._size_recipe(bench, TINY, one)
        numbers = experiment._sizes(bench, TINY.kept(one[0]), recipe, predict)
        assert done == ["clear", "step", "step", "reset", "step"]
        assert numbers["peak_bytes"] == 364
        assert recipe.hardware.gpu == "h100-sxm"
        assert float(numbers["predicted_bytes"]) > 2**20
