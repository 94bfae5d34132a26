"""The peak-memory experiment.

Its recipes describe one model, batch and optimizer, and stand next to published figures.
"""

import re
import tomllib
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch

from trainfit.catalog.load import model_config, recipes
from trainfit.models.build import build_model
from trainfit.models.native.config import from_own_keys
from trainfit.spec.parsing.recipe_file import load_recipe
from trainfit.spec.recipe import ModelSpec, Recipe
from trainfit.spec.recompute import Budget, BudgetGib
from trainfit.sweeps.read import read_sweep

FOLDER = Path(__file__).parents[2] / "recipes" / "peak-memory"
SWEEPS = ("sweep", "separate", "pareto", "bf16-quality", "bf16-quality-docs", "bf16-quality-cpu",
          "bf16-quality-cpu-docs")  # fmt: skip
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml") if path.stem not in SWEEPS)
PUBLISHED = tomllib.loads((FOLDER / "published.toml").read_text(encoding="utf-8"))["rows"]
COMPUTED_OTHERWISE = {"norm": {"rmsnorm", "rmsnorm_unfused"}, "alibi_bias": {"shared", "per_layer"}}
"""Keys of the model's config that say how the same function is computed -> their values of one function."""
KEPT = ("name", "lr", "weight_decay", "momentum")
SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4}  # fmt: skip


def read(name: str) -> Recipe:
    return load_recipe(FOLDER / f"{name}.yaml")


def config_of(recipe: Recipe) -> dict[str, Any]:
    return from_own_keys(model_config(recipe.model.config)).model_dump()


def test_the_published_table_is_whole() -> None:
    """Its abstract claims 81.2 % less memory at 1.20 times the perplexity."""
    assert len(PUBLISHED) == 11
    control, best = PUBLISHED["control"], PUBLISHED["bf16_fused_checkpoint"]
    assert (control["peak_gib"], control["samples_per_s"]) == (21.165, 2.518)
    assert 1 - best["peak_gib"] / control["peak_gib"] == pytest.approx(0.812, abs=0.0005)
    assert best["perplexity"] / control["perplexity"] == pytest.approx(1.20, abs=0.005)
    assert {*PUBLISHED, "bf16_fused_offload_checkpoint"} <= set(NAMES)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "control"])
def test_a_row_extends_the_control_and_changes_only_what_its_name_says(name: str) -> None:
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    base = re.search(r"^extends: (\S+)$", text, re.MULTILINE)
    assert base is not None
    assert base[1] == "control.yaml" or base[1].startswith("best_") or base[1] == "fused_norms.yaml"
    control, recipe = read("control"), read(name)
    assert recipe.id != control.id
    assert recipe.batch.tokens == control.batch.tokens
    for one in ("seed", "hardware", "batch.seq", *(f"optimizer.{key}" for key in KEPT)):
        assert attrgetter(one)(recipe) == attrgetter(one)(control), one
    wanted, found = config_of(control), config_of(recipe)
    for key, value in wanted.items():
        assert found[key] == value or {found[key], value} == COMPUTED_OTHERWISE[key], key
    # The name gives the techniques, so that a table can be read without opening the files.
    if not name.startswith(("best_", "least_")):
        assert ("bf16" in name) == (recipe.precision == "bf16")
        assert ("checkpoint" in name) == (recipe.recompute == "full")
        assert ("offload" in name) == recipe.offload.activations
        is_fused = name == "bf16" or re.search(r"\bfused(?!_norms)", name.replace("bf16_", "")) is not None
        assert is_fused == bool(recipe.optimizer.in_backward)


def test_the_control_is_the_shipped_recipe_of_the_published_program() -> None:
    shipped, control = load_recipe(recipes()["deep-one-1.6b"]), read("control")
    assert config_of(control) == config_of(shipped)
    same = ("batch", "precision", "attention", "recompute", "compile", "loss")
    assert [getattr(control, field) for field in same] == [getattr(shipped, field) for field in same]


def test_fused_norms_and_a_shared_bias_compute_the_same_function() -> None:
    """So a row may choose them: the logits are equal to fp32's rounding."""

    def logits(name: str) -> torch.Tensor:
        config = {**model_config(read(name).model.config), **SMALL}
        config.pop("head_dim", None)
        config.pop("num_key_value_heads", None)
        torch.manual_seed(0)
        spec, cpu = ModelSpec(config=config, implementation="native"), torch.device("cpu")
        model = build_model(spec, dtype=torch.float32, device=cpu, attention="sdpa")
        return model(torch.arange(24).reshape(2, 12)).logits

    torch.testing.assert_close(logits("control"), logits("fused_norms"), rtol=1e-5, atol=1e-5)


def test_the_sweeps_have_every_row_once_and_the_published_ones_are_trained_alike() -> None:
    sweep, separate = (read_sweep(FOLDER / f"{name}.yaml") for name in ("sweep", "separate"))
    variants = [*sweep.variants, *separate.variants]
    assert sorted(variant.name for variant in variants) == NAMES
    assert (*sweep.notes, *separate.notes) == ()  # no two rows are one recipe
    assert sweep.file.parts() == ("predict", "train")
    assert separate.file.parts() == ("predict", "measure")
    assert sweep.file.train is not None
    assert sweep.file.train.steps == 100
    assert {one.name: one.recipe.id for one in variants} == {name: read(name).id for name in NAMES}
    trained = {variant.name for variant in sweep.variants}
    assert {*PUBLISHED, "bf16_fused_offload_checkpoint", "bf16_only", "bf16_checkpoint"} <= trained


def test_a_row_that_is_only_measured_has_the_precision_and_optimizer_of_the_control() -> None:
    """So it trains alike: it differs in what is compiled, recomputed and freed."""
    control = read("control")
    for recipe in (variant.recipe for variant in read_sweep(FOLDER / "separate.yaml").variants):
        assert recipe.precision == control.precision
        assert recipe.optimizer.implementation == control.optimizer.implementation


def test_the_8b_sweep_varies_the_recompute_field_alone() -> None:
    variants = read_sweep(FOLDER.parent / "recompute-budget" / "llama-3.1-8b.yaml").variants
    base = variants[0].recipe
    assert (variants[0].name, base.recompute, variants[1].recipe.recompute) == ("none", "none", "full")
    for variant in variants:
        assert variant.recipe.model_copy(update={"recompute": "none"}) == base


def test_the_pareto_sweep_varies_recompute_and_compile_alone() -> None:
    control = read("control")
    variants = read_sweep(FOLDER / "pareto.yaml").variants
    for variant in variants:
        plain = {"recompute": control.recompute, "compile": control.compile}
        assert variant.recipe.model_copy(update=plain) == control
        assert variant.name.startswith("compiler" if variant.recipe.compile else "ours")
    budgets = [variant.recipe.recompute for variant in variants]
    assert sum(isinstance(budget, Budget) for budget in budgets) >= 5
    assert sum(isinstance(budget, BudgetGib) for budget in budgets) >= 5


@pytest.mark.parametrize("model", ["llama-3.2-1b", "qwen3-4b"])
def test_the_ladder_has_the_published_sizes(model: str) -> None:
    sweep = read_sweep(FOLDER.parent / "ladder" / f"{model}.yaml")
    for variant in sweep.variants:
        batch = variant.recipe.batch
        assert (batch.micro, batch.seq, batch.accumulate) == (4, 2048, 1)
        assert variant.recipe.model.config == model
        assert variant.recipe.optimizer.name in {"adamw", "adamw8bit"}
    names = {variant.name for variant in sweep.variants}
    assert {*PUBLISHED, "bf16_fused_offload_checkpoint"} <= names
