"""A model of the Hub by its id: its config.json in this machine's cache is read as data."""

import json
from pathlib import Path
from typing import Any

import pytest

import trainfit
from served import served
from tiny_recipe import TINY_LLAMA
from trainfit.catalog import hub
from trainfit.spec.errors import InputError
from trainfit.web.limits import recipe_of
from trainfit.web.questions import question_of


def put(cache: Path, name: str, config: str) -> None:
    """Put a config.json into a cache of the Hub's layout."""
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(config)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    put(tmp_path, "owner/tiny", json.dumps(TINY_LLAMA))
    put(tmp_path, "owner/list", "[1]")
    put(tmp_path, "owner/broken", "{")
    put(
        tmp_path,
        "owner/code",
        json.dumps({**TINY_LLAMA, "model_type": "own", "auto_map": {"AutoModel": "m.M"}}),
    )
    put(tmp_path, "owner/large", json.dumps({"text": "x" * 80_000_000}))
    return tmp_path


def asked(model: dict[str, Any]) -> trainfit.Recipe:
    return recipe_of({"model": model, "batch": {"seq": 16}})[0]


def test_a_cached_repository_is_its_config(cache: Path) -> None:
    found = trainfit.load_recipe("owner/tiny", seq=16)
    assert found.model.config == TINY_LLAMA
    assert found.model.display_name == "tiny"
    assert asked({"config": "owner/tiny"}) == found
    assert asked({"config": "owner/tiny", "name": "mine"}).model.display_name == "mine"
    assert (
        question_of("predict", {"recipe": {"model": {"config": "owner/tiny"}}}).recipe.model.config
        == TINY_LLAMA
    )


def test_a_recipe_names_a_cached_repository(cache: Path, tmp_path: Path) -> None:
    named = trainfit.load_recipe("owner/tiny", seq=16)
    file = tmp_path / "recipe.yaml"
    file.write_text("model: {config: owner/tiny}\nbatch: {seq: 16}\n")
    assert trainfit.load_recipe(file) == named
    assert trainfit.load_recipe({"model": {"config": "owner/tiny"}, "batch": {"seq": 16}}) == named
    assert trainfit.load_recipe("gpt2", set={"model.config": "owner/tiny", "batch.seq": 16}) == named
    file.write_text("model: {config: owner/tiny, name: mine}\n")
    assert trainfit.load_recipe(file).model.display_name == "mine"
    file.write_text("model: {weights: owner/tiny}\n")
    assert trainfit.load_recipe(file).model.config == TINY_LLAMA


def test_a_file_goes_before_a_cached_repository(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "own" / "owner" / "tiny"
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps({**TINY_LLAMA, "vocab_size": 640}))
    file = tmp_path / "own" / "recipe.yaml"
    file.write_text("model: {config: owner/tiny}\n")
    config = trainfit.load_recipe(file).model.config
    assert isinstance(config, dict)
    assert config["vocab_size"] == 640


def test_a_recipe_that_names_an_absent_repository_says_how_to_fetch_it(cache: Path) -> None:
    with pytest.raises(InputError, match="no such file") as refused:
        trainfit.load_recipe({"model": {"config": "owner/absent"}})
    assert "hf download owner/absent config.json" in refused.value.remedy


def test_a_name_of_the_catalog_is_the_catalogs(cache: Path) -> None:
    put(cache, "Qwen/Qwen3-8B", json.dumps(TINY_LLAMA))
    assert trainfit.load_recipe("Qwen/Qwen3-8B").model.config == "qwen3-8b"
    assert asked({"config": "Qwen/Qwen3-8B"}).model.config == "qwen3-8b"


@pytest.mark.parametrize(
    "name", ["owner/absent", "owner/..", "../owner", "owner/tiny/config.json", "owner--tiny", ""]
)
def test_what_is_not_there_is_refused_in_a_line(cache: Path, name: str) -> None:
    assert hub.cached_config(name) is None
    with pytest.raises(InputError, match=r"^model\.config = ") as refused:
        asked({"config": name})
    assert "\n" not in str(refused.value)
    named = hub.HUB_NAME.fullmatch(name) is not None
    assert ("hf download" in refused.value.remedy) is named


@pytest.mark.parametrize("name", ["owner/list", "owner/broken", "owner/large"])
def test_a_config_that_is_none_is_refused(cache: Path, name: str) -> None:
    for read in (trainfit.load_recipe, lambda text: asked({"config": text})):
        with pytest.raises(InputError) as refused:
            read(name)
        assert "\n" not in str(refused.value)


def test_code_of_a_repository_is_not_run(cache: Path) -> None:
    (snapshot,) = (cache / "models--owner--code" / "snapshots").iterdir()
    (snapshot / "m.py").write_text("raise AssertionError('run')")
    with pytest.raises(InputError, match="own") as refused:
        trainfit.predict("owner/code", seq=16)
    assert "\n" not in str(refused.value)


@pytest.mark.processes
def test_the_page_predicts_a_cached_repository(
    cache: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    with served(tmp_path_factory.mktemp("served")) as server:
        reply = server.ask("predict", {"recipe": {"model": {"config": "owner/tiny"}, "batch": {"seq": 16}}})
        assert reply.answer["estimate"]["params"] == trainfit.predict("owner/tiny", seq=16).params
        refused = server.ask("predict", {"recipe": {"model": {"config": "owner/absent"}}})
        assert refused.status == 422
