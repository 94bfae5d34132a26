"""The truth suite's draws for one technique: they use it, and existing seeds draw unchanged recipes."""

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

from evidence.scripts.accuracy import truth_suite
from evidence.scripts.accuracy.truth_techniques import PARTNERS, draw_for, drawn_techniques
from trainfit.catalog.families import FAMILIES
from trainfit.catalog.load import model_config
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.recipe import Recipe
from trainfit.techniques import registry
from trainfit.verification import draws as truth_draws

FIRST_GENERATION = (
    "accumulation", "adamw", "attention", "compile_block", "compile_model", "lora", "precision",
    "recompute_full", "sgd",
)  # fmt: skip
"""Techniques that the first suite (``truth_draws.draw``) draws."""

FIRST_DRAWS = {(1, 0.15): "982209a083b81097", (9, 0.0): "389a03853c754a86"}
"""(seed, share compiled) -> a hash of the first 200 draws, of which the measured suites were made."""


def digest(drawn: list[Any]) -> str:
    return hashlib.sha256(json.dumps(drawn).encode()).hexdigest()[:16]


def test_older_seeds_draw_what_they_drew() -> None:
    for (seed, share), expected in FIRST_DRAWS.items():
        chance = random.Random(seed)
        assert digest([truth_draws.draw(chance, "h200", share) for _ in range(200)]) == expected
    later = [draw_for(name, random.Random(name), "h200", combined=True) for name in PARTNERS]
    assert digest(later) == "c741dce0f76579b0"


def test_every_technique_joins_one_of_the_two_suites() -> None:
    drawn, weighted = (
        {name for name, technique in registry.techniques().items() if getattr(technique.draw, kind)}
        for kind in ("alone", "weights")
    )
    assert weighted == {*FIRST_GENERATION, "adafactor", "optimizer_in_backward"}
    of_one_gpu = {
        name for name, one in registry.techniques().items() if not one.fields[0].startswith("parallel.")
    }
    assert drawn | weighted == of_one_gpu  # The suites are of one GPU.
    assert not drawn & {*FIRST_GENERATION}


def checked(technique: str, chance: random.Random, *, combined: bool) -> Recipe | None:
    try:
        recipe = recipe_from(draw_for(technique, chance, "h200", combined=combined))
        registry.check(recipe)
    except InputError:
        return None
    return recipe


@pytest.mark.parametrize("technique", drawn_techniques())
def test_draws_are_allowed_ask_for_the_technique_and_vary(technique: str) -> None:
    for combined in (False, True):
        chance = random.Random(3)
        drawn = [checked(technique, chance, combined=combined) for _ in range(60)]
        recipes = [recipe for recipe in drawn if recipe is not None]
        # Refused draws cost nothing but time; too many of them would.
        assert len(recipes) >= (30 if not combined else 8)
        assert all(registry.techniques()[technique].applies(recipe) for recipe in recipes)
        assert len({recipe.model.config for recipe in recipes if isinstance(recipe.model.config, str)}) >= 6
        needed = registry.techniques()[technique].needs.get("model", {}).get("implementation")
        implementations = {needed} if needed else {"hf", "native"}
        assert {recipe.model.implementation for recipe in recipes} == implementations
    others = [
        name
        for name, other in registry.techniques().items()
        if name != technique and any(other.applies(recipe) for recipe in recipes)
    ]
    assert len(others) >= 4


def num_blocks(name: str) -> int:
    config = model_config(name)
    return next(config[key] for key in ("num_hidden_layers", "n_layer", "num_layers") if key in config)


def test_a_plan_names_every_block() -> None:
    chance = random.Random(0)
    for _ in range(40):
        data = draw_for("recompute_layers", chance, "h200", combined=False)
        assert sum(run["count"] for run in data["recompute"]["layers"]) == num_blocks(data["model"]["config"])


def test_kernels_are_drawn_for_models_that_they_take() -> None:
    chance = random.Random(5)
    fused = [draw_for("fused_loss", chance, "h200", combined=False) for _ in range(40)]
    assert any("gemma-2-" in data["model"]["config"] for data in fused), "soft-capped logits"
    for _ in range(40):
        model = draw_for("block_kernels", chance, "h200", combined=True)["model"]
        families = ("llama", "mistral", "qwen2", "qwen3") if model["implementation"] == "hf" else ("native",)
        assert any(model["config"] in FAMILIES[family] for family in families)


def test_an_unknown_technique_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert truth_suite.main([str(tmp_path / "out.jsonl"), "--technique", "mouon"]) == 65
    assert "muon" in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()
