"""``bench soft_prompts``: the task has a known floor, and layers learn it faster."""

import math

import pytest
import torch

from trainfit.bench.experiments import soft_prompts as experiment
from trainfit.bench.harness.runner import run
from trainfit.spec.bench import BenchRow

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
    assert (
        found["p-tuning, lstm"]["trained_params"] > found["p-tuning, mlp"]["trained_params"] > kept["prompt"]
    )


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
