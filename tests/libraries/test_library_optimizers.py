"""Recipes with bitsandbytes' optimizers: the bytes of the usual script, training on a CPU, checkpoints."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import trainfit
from tiny_recipe import tiny_recipe, wide_recipe
from trainfit.prediction.trace import trace
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Optimizer
from trainfit.step import assemble
from trainfit.techniques.registry import check_device
from trainfit.training import checkpoint
from virtual_runs import sums

CPU = torch.device("cpu")
CONFIG: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 8000, "max_position_embeddings": 1024,
}  # fmt: skip
CLASSES = {
    "bnb-adamw8bit": "AdamW8bit", "paged-adamw8bit": "PagedAdamW8bit", "paged-adamw": "PagedAdamW32bit",
}  # fmt: skip


def script(name: str) -> None:
    """Train with bitsandbytes' class as its documentation shows it."""
    import bitsandbytes as bnb
    from transformers import LlamaConfig, LlamaForCausalLM

    model: Any = LlamaForCausalLM(LlamaConfig(**CONFIG)).bfloat16()
    model.cuda().train()
    optimizer = getattr(bnb.optim, name)(model.parameters(), lr=1e-4)
    for _ in range(2):
        ids = torch.randint(0, 8000, (2, 512), device="cuda")
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def recipe_of(name: str) -> dict[str, Any]:
    return {
        "model": {"config": {"model_type": "llama", **CONFIG}},
        "batch": {"micro": 2, "seq": 512},
        "optimizer": {"name": name},
        "hardware": {"gpu": "h200"},
    }


@pytest.mark.parametrize("name", CLASSES)
def test_a_recipe_has_the_bytes_of_the_usual_script(name: str) -> None:
    traced = trainfit.trace(lambda: script(CLASSES[name]), gpu="h200", steps=2)
    estimate = trainfit.predict(recipe_of(name))
    assert estimate.peak_allocated_bytes == pytest.approx(traced.peak_allocated_bytes, rel=1e-3)
    assert estimate.breakdown.optimizer == pytest.approx(traced.breakdown.optimizer, rel=1e-3)
    assert estimate.host_bytes == traced.host_bytes
    assert (estimate.host_bytes > 0) == name.startswith("paged")
    assert any("paged optimizer states" in line for line in estimate.assumptions) == (estimate.host_bytes > 0)
    assert "bitsandbytes" in estimate.versions


def test_layout_of_states() -> None:
    """A byte an element and 4 for each 256; 8 for tensors under 4,096 elements; both tables once."""
    recipe = wide_recipe(4, optimizer=Optimizer(name="bnb-adamw8bit"))
    ledger = trace(recipe)
    with torch.device("meta"):
        plain = assemble(recipe.model_copy(update={"optimizer": Optimizer(name="sgd")}), torch.device("meta"))
    sizes = [parameter.numel() for parameter in plain.model.parameters()]
    expected = 2 * 1024 + sum(
        2 * (stored(4 * n) if n < 4096 else stored(n) + stored(4 * math.ceil(n / 256))) for n in sizes
    )
    assert sums(ledger)["breakdown"]["optimizer"] == expected
    assert ledger.ops_without_flops == ()


def stored(num_bytes: int) -> int:
    return -(-num_bytes // 512) * 512


@pytest.mark.parametrize("name", CLASSES)
def test_it_learns_and_resumes_to_the_last_bit(name: Any, tmp_path: Path) -> None:
    recipe = wide_recipe(2, optimizer=Optimizer(name=name, lr=1e-2))
    straight = assemble(recipe, CPU)
    batches = straight.random_batches()
    losses = [straight(batches).item() for _ in range(6)]
    assert losses[-1] < losses[0] - 0.1
    saved = checkpoint.save(tmp_path, straight, checkpoint.Progress(6, losses[-1]), {}, keep=1)
    expected = [straight(batches).item() for _ in range(3)]
    resumed = assemble(recipe, CPU)
    checkpoint.load(saved, resumed)
    assert [resumed(batches).item() for _ in range(3)] == expected


def test_the_states_are_those_of_the_class_itself() -> None:
    import bitsandbytes as bnb

    recipe = wide_recipe(1, optimizer=Optimizer(name="bnb-adamw8bit", lr=1e-3, weight_decay=0.1))
    ours, theirs = assemble(recipe, CPU), assemble(recipe, CPU)
    theirs.optimizers[:] = [bnb.optim.AdamW8bit(theirs.model.parameters(), lr=1e-3, weight_decay=0.1)]
    for seed in range(3):
        assert ours(ours.random_batches(seed)).item() == theirs(theirs.random_batches(seed)).item()
    for a, b in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_paged_states_are_not_run_on_a_gpu() -> None:
    for name in ("paged-adamw", "paged-adamw8bit"):
        recipe = tiny_recipe(optimizer=Optimizer(name=name))
        check_device(recipe, "cpu")
        with pytest.raises(InputError, match="managed memory can hang a GPU"):
            check_device(recipe, "cuda")
