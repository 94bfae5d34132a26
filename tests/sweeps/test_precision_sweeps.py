"""The sweeps of precisions: what is compared differs in its precision alone, and every row runs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from trainfit.spec.recipe import Recipe
from trainfit.step import assemble
from trainfit.sweeps.read import Sweep, read_sweep
from trainfit.techniques import registry

pytest.importorskip("torchao")
pytest.importorskip("peft")

FOLDER = Path(__file__).parents[2] / "recipes" / "techniques"
FILES = ("precision", "precision-rates", "precision-bases", "precision-memory")
ENDINGS = (" seed 1", " slow", " sgd")
SMALL = ["batch.micro=1", "batch.seq=32", "hardware.gpu=cpu"]
PRECISIONS = {
    "fp32", "amp-bf16", "amp-fp16", "bf16-master", "fp16-master", "bf16", "bf16-rounded", "fp16-pure", "fp8",
}  # fmt: skip


def sweep(name: str, settings: list[str] | None = None) -> Sweep:
    return read_sweep(FOLDER / f"{name}.yaml", settings=settings)


def group(name: str) -> str:
    return next((end for end in ENDINGS if name.endswith(end)), "lora" if name.startswith("lora") else "")


def apart_from_precision(recipe: Recipe) -> dict[str, Any]:
    content = recipe.content()
    del content["precision"], content["quantize"], content["optimizer"]["stochastic_rounding"]
    return content


@pytest.mark.parametrize("name", FILES)
def test_rows_of_a_group_differ_in_their_precision_alone(name: str) -> None:
    found = sweep(name)
    assert len({one.recipe.id for one in found.variants}) == len(found.variants)
    groups: dict[str, list[Recipe]] = {}
    for one in found.variants:
        registry.check(one.recipe)
        groups.setdefault(group(one.name), []).append(one.recipe)
    for recipes in groups.values():
        assert all(apart_from_precision(one) == apart_from_precision(recipes[0]) for one in recipes)
    if name != "precision-memory":
        assert found.file.train is not None
        assert (found.file.train.steps, found.file.train.data) == (1000, "stories")


def test_all_precisions_are_compared() -> None:
    assert {one.name for one in sweep("precision").variants} == PRECISIONS
    bases = {str(one.recipe.base.kind) for one in sweep("precision-bases").variants if one.recipe.base}
    assert bases == {"fp8", "int8", "nf4"}
    memory = {one.name for one in sweep("precision-memory").variants if group(one.name) != "lora"}
    assert memory == PRECISIONS


@pytest.mark.parametrize("name", [*sorted(PRECISIONS), "lora int8", "lora nf4"])
def test_every_row_trains_on_a_cpu(name: str) -> None:
    """Three steps on one batch. AdamW's second moment underflows in fp16 alone."""
    file = "precision-bases" if group(name) == "lora" else "precision"
    (recipe,) = [one.recipe for one in sweep(file, SMALL).variants if one.name == name]
    step = assemble(recipe, torch.device("cpu"))
    batches = step.random_batches()
    losses = [step(batches).item() for _ in range(3)]
    if name == "fp16-pure":
        assert not losses[-1] < losses[0]
    else:
        assert losses[-1] < losses[0]
