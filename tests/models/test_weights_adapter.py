"""Adapters that PEFT saved, as the start of a recipe's adapter."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file

from saved_weights import batch_of, loss_of, recipe_for, saved_weights
from trainfit.models.weights.check import check_weights
from trainfit.models.weights.folder import ADAPTER
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe
from trainfit.step import Step, assemble

LORA = {"kind": "lora", "rank": 4, "alpha": 8}


def saved_adapter(tmp_path: Path, config: Any) -> Any:
    """Save a base model and, by PEFT, an adapter of random values; return PEFT's model."""
    base = saved_weights(tmp_path / "base", "qwen3")
    torch.manual_seed(7)
    model = get_peft_model(base, config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter")
    return model.eval()


def recipe_of(tmp_path: Path, implementation: str = "hf", **adapter: Any) -> Recipe:
    recipe = recipe_for(tmp_path / "base", implementation, adapter=adapter)
    model = recipe.model.model_copy(update={"weights": str(tmp_path / "adapter")})
    return recipe.model_copy(update={"model": model})


def started(recipe: Recipe) -> Step:
    return assemble(recipe, torch.device("cpu"))


def test_lora_of_transformers(tmp_path: Path) -> None:
    theirs = saved_adapter(tmp_path, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    recipe = recipe_of(tmp_path, **LORA)
    assert check_weights(recipe, fetch=False) == ()
    step = started(recipe)
    assert step([batch_of()]).item() == pytest.approx(loss_of(theirs), abs=1e-5)
    assert step.weights is not None
    assert step.weights.note().endswith(f"; the adapter of {tmp_path / 'adapter'}")


def test_lora_of_the_native_decoder_where_projections_share_a(tmp_path: Path) -> None:
    theirs = saved_adapter(tmp_path, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    recipe = recipe_of(tmp_path, "native", **LORA)
    with pytest.raises(InputError, match="use model.implementation: hf"):
        started(recipe)
    state = load_file(tmp_path / "adapter" / ADAPTER)
    for name in state:
        for part, first in {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}.items():
            if f".{part}.lora_A" in name:
                state[name] = state[name.replace(part, first)].clone()
    save_file(state, tmp_path / "adapter" / ADAPTER)
    theirs = PeftModel.from_pretrained(theirs.unload(), tmp_path / "adapter").eval()
    assert started(recipe)([batch_of()]).item() == pytest.approx(loss_of(theirs), abs=1e-5)


@pytest.mark.parametrize("variant", [{"use_dora": True}, {"use_rslora": True}])
def test_dora_and_rslora(variant: dict[str, Any], tmp_path: Path) -> None:
    theirs = saved_adapter(tmp_path, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", **variant))
    own: dict[str, Any] = {name.removeprefix("use_"): value for name, value in variant.items()}
    recipe = recipe_of(tmp_path, **LORA, **own)
    assert started(recipe)([batch_of()]).item() == pytest.approx(loss_of(theirs), abs=1e-5)
    field = f"adapter.{next(iter(own))}"
    with pytest.raises(InputError, match=rf"has true; write {field}: true"):
        check_weights(recipe_of(tmp_path, **LORA), fetch=False)


@pytest.mark.parametrize(
    ("key", "value"),
    [("alpha_pattern", {"q_proj": 64}), ("layer_replication", [[0, 2]]), ("init_lora_weights", "pissa")],
)
def test_a_lora_that_no_recipe_computes(key: str, value: Any, tmp_path: Path) -> None:
    saved_adapter(tmp_path, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(InputError, match=f"{key} = .*merge the adapter"):
        check_weights(recipe_of(tmp_path, **LORA), fetch=False)


def test_an_adapter_of_an_adapter(tmp_path: Path) -> None:
    saved_adapter(tmp_path, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    shutil.copytree(tmp_path / "adapter", tmp_path / "second")
    for base, folder in (("adapter", "second"), ("adapter", "adapter")):
        file = tmp_path / folder / "adapter_config.json"
        config = json.loads(file.read_text()) | {"base_model_name_or_path": str(tmp_path / base)}
        file.write_text(json.dumps(config))
        recipe = recipe_of(tmp_path, **LORA)
        model = recipe.model.model_copy(update={"weights": str(tmp_path / folder)})
        recipe = recipe.model_copy(update={"model": model})
        for check in (lambda recipe: check_weights(recipe, fetch=False), started):
            with pytest.raises(InputError, match="it holds an adapter, and no model"):
                check(recipe)


@pytest.mark.parametrize("implementation", ["hf", "native"])
def test_virtual_tokens(implementation: str, tmp_path: Path) -> None:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    theirs = saved_adapter(tmp_path, config)
    step = started(recipe_of(tmp_path, implementation, kind="prompt", tokens=5))
    own = next(one for name, one in step.model.named_parameters() if "prompt_encoder" in name)
    assert torch.equal(own, theirs.prompt_encoder["default"].embedding.weight)


@pytest.mark.parametrize(
    ("adapter", "words"),
    [
        ({**LORA, "rank": 8}, ["adapter.rank = 8", "has 4", "write adapter.rank: 4"]),
        ({**LORA, "alpha": 4}, ["adapter.alpha = 4", "has 8"]),
        ({"kind": "prompt"}, ["holds an adapter (lora)", "the recipe has prompt", "--set adapter=lora"]),
        ({**LORA, "targets": ("q_proj",)}, ["has, and the recipe's adapter has not,", "adapter.targets"]),
    ],
)
def test_other_adapters_are_refused(adapter: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    saved_adapter(tmp_path, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    with pytest.raises(InputError) as caught:
        started(recipe_of(tmp_path, **adapter))
    for word in words:
        assert word in str(caught.value)


def test_an_adapter_without_an_adapter_in_the_recipe(tmp_path: Path) -> None:
    saved_adapter(tmp_path, LoraConfig(r=4, target_modules="all-linear"))
    recipe = recipe_of(tmp_path, **LORA).model_copy(update={"adapter": None})
    with pytest.raises(InputError, match="the recipe has none; add --set adapter=lora"):
        check_weights(recipe, fetch=False)
