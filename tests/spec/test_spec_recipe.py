"""Recipes: what files say, extends chains, settings, identity."""

import io
import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from trainfit.spec.errors import InputError
from trainfit.spec.parsing.parse import parse
from trainfit.spec.parsing.recipe_file import apply_settings, load_recipe, recipe_from
from trainfit.spec.recipe import Batch, ModelSpec, Parallel, Recipe
from trainfit.spec.recompute import Budget, Every, Layers

CONFIG = {"model_type": "llama", "rope_theta": 1e6, "text": "1e-4", "flag": None}
WHOLE = {
    "model": {"config": CONFIG, "name": "mine"},
    "batch": {"micro": 4, "seq": 2048, "accumulate": 2},
    "precision": "amp-bf16",
    "attention": "flash",
    "recompute": {"every": 2},
    "compile": "block",
    "optimizer": {"name": "sgd", "implementation": "foreach", "lr": 1e-5, "momentum": 0.9},
    "adapter": {"kind": "lora", "rank": 8, "targets": ["q_proj", "v_proj"]},
    "parallel": {"replicate": 2, "shard": 2},
    "hardware": {"gpu": "h100-sxm", "count": 4, "price_per_hour": 2},
    "seed": 7,
}


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_yaml_1_2_scalars(tmp_path: Path) -> None:
    recipe = load_recipe(
        write(tmp_path / "r.yaml", "model: {config: gpt2}\noptimizer: {lr: 1e-4}\nbatch: {seq: 010}\n")
    )
    assert recipe.optimizer.lr == 1e-4
    assert recipe.batch.seq == 10  # YAML 1.1 would read 8.


def test_defaults_are_the_documented_ones() -> None:
    recipe = recipe_from({"model": {"config": "gpt2"}})
    stated = {
        "precision": "bf16", "attention": "sdpa", "loss": "standard", "recompute": "none", "compile": False,
    }  # fmt: skip
    assert stated.items() <= dict(recipe).items()
    assert recipe.optimizer.implementation == "fused"
    assert recipe.batch.tokens == 1024


def test_same_content_same_id_through_yaml_and_json(tmp_path: Path) -> None:
    from ruamel.yaml import YAML

    recipe = recipe_from(WHOLE)
    as_json = write(tmp_path / "r.json", json.dumps(recipe.content()))
    text = io.StringIO()
    YAML(typ="safe", pure=True).dump(recipe.content(), text)
    as_yaml = write(tmp_path / "r.yaml", text.getvalue())
    assert load_recipe(as_json) == recipe
    assert load_recipe(as_json).id == load_recipe(as_yaml).id == recipe.id
    assert Recipe.model_validate_json(recipe.model_dump_json()).id == recipe.id


def test_id_follows_content_only() -> None:
    recipe = recipe_from(WHOLE)
    again = recipe_from(dict(reversed(list(WHOLE.items()))))
    other = recipe_from(WHOLE, ["seed=8"])
    assert again.id == recipe.id != other.id
    assert len(recipe.id) == 16
    # A default written out and a default left out are the same recipe.
    short, long = {"model": {"config": "gpt2"}}, {"model": {"config": "gpt2"}, "batch": {"micro": 1}}
    assert recipe_from(short).id == recipe_from(long).id


def test_frozen() -> None:
    recipe = recipe_from(WHOLE)
    with pytest.raises(ValidationError, match="frozen"):
        recipe.seed = 3  # type: ignore[misc]
    with pytest.raises(ValidationError, match="hardware.count"):
        Recipe(model=ModelSpec(config="gpt2"), hardware=recipe.hardware, parallel=Parallel(shard=3))


def test_extends_merges_by_key_and_replaces_whole_values(tmp_path: Path) -> None:
    write(
        tmp_path / "base.yaml",
        "model: {config: {a: 1, b: 2}}\nbatch: {micro: 4, seq: 64}\nrecompute: {every: 2}\nseed: 1\n",
    )
    (tmp_path / "deep").mkdir()
    write(
        tmp_path / "deep" / "middle.yaml",
        "extends: ../base.yaml\nbatch: {seq: 128}\nrecompute: {budget: 0.5}\n",
    )
    recipe = load_recipe(write(tmp_path / "top.yaml", "extends: deep/middle.yaml\nmodel: {config: {c: 3}}\n"))
    assert recipe.batch == Batch(micro=4, seq=128)
    assert recipe.model.config == {"c": 3}
    assert recipe.recompute == Budget(budget=0.5)
    assert recipe.seed == 1


def test_extends_cycles_and_long_chains_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", "extends: b.yaml\n")
    write(tmp_path / "b.yaml", "extends: c.yaml\n")
    write(tmp_path / "c.yaml", "extends: ./../" + tmp_path.name + "/a.yaml\n")
    chain = "a.yaml -> b.yaml -> c.yaml -> a.yaml"
    with pytest.raises(InputError, match=rf"c\.yaml: extends = .*extends itself; break the cycle {chain}"):
        load_recipe(tmp_path / "a.yaml")
    for index in range(40):
        write(tmp_path / f"{index}.yaml", f"extends: {index + 1}.yaml\n")
    with pytest.raises(InputError, match="the chain is over 32 files long"):
        load_recipe(tmp_path / "0.yaml")


def test_errors_name_the_file_that_says_the_value(tmp_path: Path) -> None:
    base = write(tmp_path / "base.yaml", "model: {config: gpt2}\nbatch: {micro: 0}\n")
    top = write(tmp_path / "top.yaml", "extends: base.yaml\nseed: 3\n")
    with pytest.raises(InputError) as caught:
        load_recipe(top)
    assert str(caught.value).startswith(f"{base}: batch.micro = 0")
    with pytest.raises(InputError) as caught:
        load_recipe(top, ["batch.micro=-2"])
    assert str(caught.value).startswith("--set: batch.micro = -2")
    assert load_recipe(top, ["batch.micro=2"]).batch.micro == 2


def test_config_json_beside_the_recipe(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    write(folder / "config.json", '{"model_type": "llama", "hidden_size": 64}')
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    for text in ("../my-model/config.json", "../my-model", "../my-model/"):
        recipe = load_recipe(write(recipes / "r.yaml", f"model: {{config: {text}}}\n"))
        assert recipe.model.config == {"model_type": "llama", "hidden_size": 64}
        assert recipe.model.display_name == "my-model"
    write(folder / "config.json", "[1]")
    with pytest.raises(InputError, match="not a mapping; write a config.json's object"):
        load_recipe(recipes / "r.yaml")


@pytest.mark.parametrize(
    ("setting", "field", "value"),
    [
        ("batch.micro=8", "batch", Batch(micro=8, seq=64)),
        ("optimizer.lr=1e-3", "optimizer.lr", 1e-3),
        ("compile=block", "compile", "block"),
        ("compile=false", "compile", False),
        ("recompute={every: 2}", "recompute", Every(every=2)),
        ("recompute.budget=0.25", "recompute", Budget(budget=0.25)),
        ("adapter.kind=lora", "adapter.rank", 16),
        ("adapter=null", "adapter", None),
        ("model.config.layers=3", "model.config", {"model_type": "x", "layers": 3}),
        ("model.name=a=b", "model.name", "a=b"),
    ],
)
def test_settings(setting: str, field: str, value: object) -> None:
    data = {"model": {"config": {"model_type": "x"}}, "batch": {"seq": 64}, "recompute": {"every": 4}}
    found: object = recipe_from(data, [setting])
    for part in field.split("."):
        found = getattr(found, part)
    assert found == value
    assert data["batch"] == {"seq": 64}


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("batch.micro", "--set: 'batch.micro': not a setting; write --set field.name=value"),
        ("=3", "not a setting"),
        ("a..b=3", "not a setting"),
        ("batch.micro=4 GiB", "--set: batch.micro = '4 GiB': should be a whole number"),
        ("batch.mirco=4", "--set: batch.mirco = 4: unknown key; did you mean 'micro'?"),
        ("seed=[", "--set: seed = '[': not YAML"),
        ("seed={a: 1, a: 2}", "--set: seed = '{a: 1, a: 2}': duplicate key 'a'"),
        ("model.config.layers=3", "config is the name 'gpt2', which has no keys to set"),
    ],
)
def test_settings_refused(setting: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        recipe_from({"model": {"config": "gpt2"}}, [setting])
    assert says in str(caught.value)


def test_runs_of_blocks_are_joined() -> None:
    model = {"model": {"config": "gpt2"}}
    runs = [{"recompute": "full", "count": 2}, {"count": 1}]
    short = recipe_from({**model, "recompute": {"layers": ["full", "full", "none"]}})
    long = recipe_from({**model, "recompute": {"layers": runs}})
    assert short == long
    assert short.id == long.id
    assert isinstance(short.recompute, Layers)
    assert [block.recompute for block in short.recompute.blocks()] == ["full", "full", "none"]
    assert parse(Recipe, short.content()) == short


def test_ids_of_all_stored_records_are_those_of_their_recipes() -> None:
    """A recipe's id is a hash of its content: what was recorded under it is found by today's code."""
    count = 0
    for file in (Path(__file__).parents[2] / "evidence" / "records").rglob("*.jsonl"):
        for number, line in enumerate(file.read_text().splitlines(), 1):
            data = json.loads(line)
            if data.get("recipe") and data.get("recipe_id"):
                assert parse(Recipe, data["recipe"]).id == data["recipe_id"], f"{file}:{number}"
                count += 1
    assert count > 1800


def test_settings_apply_in_order_and_in_any_case() -> None:
    assert apply_settings({}, ["a.b=1", "a.c=2", "a.b=3"]) == {"a": {"b": 3, "c": 2}}
    config = {"model_type": "llama", "hidden_size": 64}
    recipe = recipe_from({"model": {"config": config}}, ["BATCH.MICRO=4", "Seed=3", "Model.Config.Own_Key=1"])
    assert (recipe.batch.micro, recipe.seed) == (4, 3)
    assert recipe.model.config == config | {"Own_Key": 1}


def test_a_copy_with_changes_has_an_id_of_its_own() -> None:
    recipe = recipe_from(WHOLE)
    before = recipe.id
    more = recipe.model_copy(update={"batch": recipe.batch.model_copy(update={"accumulate": 3})})
    assert more.id == recipe_from(more.content()).id != before == recipe.id
