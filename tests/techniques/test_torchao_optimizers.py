"""torchao's AdamW in recipes: its states, and the fp32 copies that its compiled update holds."""

from typing import Any

import pytest
import torch

from tiny_recipe import tiny_recipe
from trainfit.prediction.trace import trace
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Offload, Optimizer
from trainfit.step import assemble
from trainfit.techniques.registry import check
from virtual_runs import PLAIN, recipe_of, sums

pytest.importorskip("torchao")
CPU = torch.device("cpu")
CONFIG = {**PLAIN, "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 1, "vocab_size": 4096}
"""Matrices of few shapes: each is compiled by itself."""


@pytest.mark.slow
def test_bytes_of_states_and_of_the_update() -> None:
    """A byte an element, 4 for each 256, two tables a weight; two fp32 copies of a weight in its update."""
    recipe = recipe_of(CONFIG, "native", optimizer=Optimizer(name="torchao-adamw8bit"))
    ledger, plain = trace(recipe), trace(recipe.model_copy(update={"optimizer": Optimizer(name="sgd")}))
    sizes = [p.numel() for p in assemble(recipe, torch.device("meta")).model.parameters()]
    expected = sum(
        2 * (stored(n) + stored(4 * n // 256) + 1024) if n >= 4096 else 2 * stored(2 * n) for n in sizes
    )
    states = sum(stored(s.num_bytes) for s in ledger.storages if s.category == "optimizer")
    assert states == pytest.approx(expected, rel=1e-3)
    held, without = sums(ledger), sums(plain)
    update = held["phases"]["steady"]["optimizer"] - without["phases"]["steady"]["optimizer"] - expected
    assert update == pytest.approx(2 * 4 * max(sizes), rel=0.05)
    assert ledger.ops_without_flops == ()


def stored(num_bytes: int) -> int:
    return -(-num_bytes // 512) * 512


def test_on_a_real_device_it_is_the_class_itself() -> None:
    from torchao.optim import AdamW8bit

    recipe = tiny_recipe(layers=1, optimizer=Optimizer(name="torchao-adamw8bit", lr=1e-3), precision="bf16")
    ours, theirs = assemble(recipe, CPU), assemble(recipe, CPU)
    theirs.optimizers[:] = [AdamW8bit(theirs.model.parameters(), lr=1e-3, weight_decay=0.01)]
    with torch.compiler.set_stance("force_eager"):
        losses = [[step(step.random_batches(seed)).item() for seed in range(3)] for step in (ours, theirs)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"optimizer": {"implementation": "foreach"}}, "optimizer.implementation"),
        ({"optimizer": {"momentum": 0.9}}, "optimizer.momentum"),
        ({"optimizer": {"stochastic_rounding": True}}, "optimizer.stochastic_rounding"),
        ({"offload": Offload(optimizer=True)}, "optimizer.name"),
    ],
    ids=str,
)
def test_refusals(fields: dict[str, Any], field: str) -> None:
    optimizer = Optimizer(name="torchao-adamw4bit", **fields.pop("optimizer", {}))
    with pytest.raises(InputError) as caught:
        check(tiny_recipe(optimizer=optimizer, precision="bf16", **fields))
    assert caught.value.field == field
