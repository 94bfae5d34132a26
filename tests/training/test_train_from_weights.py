"""Runs from a folder's weights: the first loss is transformers', and a resumed run needs no folder."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from saved_weights import config_of, saved_weights
from tiny_training import LLAMA, Listener, options_for, tiny
from trainfit.cli.main import main
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe
from trainfit.training.corpus import opened
from trainfit.training.folder import DATA
from trainfit.training.loop import train
from trainfit.training.order import step_sequences

CONFIG: dict[str, Any] = {"vocab_size": 384, "num_key_value_heads": 2}


def recipe_of(folder: Path, implementation: str, *settings: str) -> Recipe:
    model = ("model.weights=" + str(folder), f"model.implementation={implementation}")
    return tiny(*model, *settings, config=config_of(folder))


def loss_of_step(theirs: torch.nn.Module, out: Path, recipe: Recipe) -> float:
    """Return transformers' loss of the run's first batch."""
    corpus = opened(out / DATA, recipe.batch.seq).train
    ids = step_sequences(corpus, recipe.seed, recipe.batch.micro, 0)["input_ids"]
    with torch.no_grad():
        return theirs(input_ids=ids, labels=ids).loss.item()


@pytest.mark.parametrize("implementation", ["hf", "native"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_loss_is_that_of_transformers(
    implementation: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    theirs = saved_weights(tmp_path / "model", "qwen3", CONFIG, dtype=dtype, max_shard_size="50KB")
    recipe = recipe_of(tmp_path / "model", implementation)
    listener = Listener()
    summary = train(recipe, options_for(tmp_path / "run", 2), observers=[listener])
    assert summary.losses[0] == pytest.approx(loss_of_step(theirs, tmp_path / "run", recipe), abs=1e-5)
    note = listener.run.notes[0]
    assert note.startswith("weights: 25 tensors")
    assert note.endswith("in fp32" if dtype == torch.float32 else "in bf16, converted to fp32")


def test_a_resumed_run_needs_no_folder(tmp_path: Path) -> None:
    saved_weights(tmp_path / "model", "llama", CONFIG)
    recipe = recipe_of(tmp_path / "model", "hf")
    straight = train(recipe, options_for(tmp_path / "straight", 4))
    options = options_for(tmp_path / "run", 2)
    first = train(recipe, options)
    shutil.rmtree(tmp_path / "model")
    second = train(recipe, options.model_copy(update={"steps": 4, "resume": True}))
    assert first.losses + second.losses == straight.losses
    with pytest.raises(InputError, match="no such folder"):
        train(recipe, options_for(tmp_path / "new", 2))


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    saved_weights(tmp_path / "model", "llama", CONFIG)
    file = tmp_path / "model" / "model.safetensors"
    values = load_file(file)
    values["model.norm.weight"][3] = float("nan")
    save_file(values, file)
    with pytest.raises(InputError, match=r"model.weights = .*: model.norm.weight holds NaN or infinity"):
        train(recipe_of(tmp_path / "model", "hf"), options_for(tmp_path / "run", 2))


def trainfit(*words: object) -> int:
    return main([str(word) for word in words])


def test_the_command_says_what_it_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    saved_weights(model, "llama", CONFIG)
    common = ("--set", "precision=fp32", "--seq", 32, "--steps", 1, "--device", "cpu", "--data", "stories:60")
    assert trainfit("train", model, "--weights", model, *common, "--out", tmp_path / "a", "--json") == 0
    run = json.loads(capsys.readouterr().out)["run"]
    assert run["notes"][0].startswith("weights: 21 tensors")
    assert trainfit("train", model, "--lora", *common, "--out", tmp_path / "b", "--json") == 0
    err = capsys.readouterr().err
    assert "an adapter (lora) learns nothing of use on a random base" in err
    assert f"the folder's weights are not read: model.weights is random; --weights {model}" in err


def test_predict_checks_a_folder_and_predicts_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    saved_weights(model, "llama", CONFIG)
    words = ("predict", model, "--gpu", "h100-sxm", "--seq", 32, "--json")
    found = []
    for more in ((), ("--weights", model), ("--qlora",), ("--qlora", "--weights", model)):
        assert trainfit(*words, *more) == 0
        found.append(json.loads(capsys.readouterr().out))
    for plain, weighted in (found[:2], found[2:]):
        own = {name: value for name, value in plain.items() if name not in ("assumptions", "recipe_id")}
        assert own == {name: weighted[name] for name in own}
    warnings = [any("learns nothing of use" in line for line in one["assumptions"]) for one in found]
    assert warnings == [False, False, True, False]
    (model / "other").mkdir()
    saved_weights(model / "other", "llama", {**CONFIG, "num_hidden_layers": 3, "rms_norm_eps": 1e-4})
    assert trainfit(*words, "--weights", model / "other") == 65
    assert "it has 9 tensors (model.layers.2" in capsys.readouterr().err
    saved_weights(model / "other", "llama", {**CONFIG, "rms_norm_eps": 1e-4})
    assert trainfit(*words, "--weights", model / "other") == 0
    (note,) = [one for one in json.loads(capsys.readouterr().out)["assumptions"] if "model.weights" in one]
    assert (
        "saved with another config than the recipe's model: rms_norm_eps 0.0001 (the recipe: 1e-06)" in note
    )


def test_paths_in_recipe_files(tmp_path: Path) -> None:
    from trainfit.spec.parsing.recipe_file import load_recipe

    saved_weights(tmp_path / "model", "llama", CONFIG)
    (tmp_path / "a.yaml").write_text("model: {weights: model}\n")
    recipe = load_recipe(tmp_path / "a.yaml")
    assert recipe.model.weights == str(tmp_path / "model")
    assert recipe.model.config == config_of(tmp_path / "model")
    assert recipe.model.name == "model"
    (tmp_path / "b.yaml").write_text(
        "extends: a.yaml\nmodel: {config: model/config.json, weights: ./elsewhere}\n"
    )
    assert load_recipe(tmp_path / "b.yaml").model.weights == str(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=r"model.weights.*at least 1"):
        tiny("model.weights=''", config=LLAMA)
    (tmp_path / "c.yaml").write_text("model: {weights: Qwen/Qwen3-8B@main}\n")
    assert load_recipe(tmp_path / "c.yaml").model.weights == "Qwen/Qwen3-8B@main"
    assert load_recipe(tmp_path / "c.yaml").model.config == "qwen3-8b"
    assert tiny(config=LLAMA).id == tiny("model.weights=random", config=LLAMA).id
