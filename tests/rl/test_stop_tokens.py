"""Tokens that end a completion: of the tokenizer, of the model's folder, and of the recipe."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tiny_policies import GRPO, options_for, policy, trained
from trainfit.rl import stop_tokens
from trainfit.rl.answers import PolicyTokenizer, write_tokenizer
from trainfit.rl.rollout.generate import Generator
from trainfit.spec.errors import InputError


def folder_of(path: Path, **files: Any) -> Path:
    """A folder with a tokenizer of bytes, whose token 256 is <|endoftext|> and 255 a turn's end."""
    path.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet[:255])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary | {alphabet[255]: 255}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


CASES: list[tuple[dict[str, Any], tuple[int, ...]]] = [
    ({}, (256,)),
    ({"generation_config": {"eos_token_id": [7, 256, 9]}}, (256, 7, 9)),
    ({"generation_config": {"eos_token_id": 7}, "config": {"eos_token_id": 8}}, (256, 7)),
    ({"generation_config": {"top_p": 0.9}, "config": {"eos_token_id": [8]}}, (256, 8)),
]


@pytest.mark.parametrize(("files", "stops"), CASES)
@pytest.mark.parametrize("given", ["folder", "file"])
def test_all_ends_of_the_folder_stop(
    files: dict[str, Any], stops: tuple[int, ...], given: str, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "model", **files)
    name = str(folder if given == "folder" and files else folder / "tokenizer.json")
    if given == "folder" and files:
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"})
        )
    write_tokenizer(
        tmp_path / "data", options_for(tmp_path / "run", 1, tokenizer=name), 257, weights="random"
    )
    assert PolicyTokenizer.in_folder(tmp_path / "data").stops == stops


def test_the_weights_folder_counts_too(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert stop_tokens.of_folders(None, str(weights)) == (3, 4)
    assert stop_tokens.of_folders("gpt2", "random") == ()
    (weights / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(InputError, match="no token ids") as refused:
        stop_tokens.of_folders(None, str(weights))
    assert (refused.value.field, refused.value.file) == (
        "eos_token_id", str(weights / "generation_config.json")
    )  # fmt: skip


def test_stops_of_a_recipe_are_texts_or_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, ...]] = []
    plain = Generator.__init__

    def noted(self: Generator, model: Any, sampling: Any, **more: Any) -> None:
        made.append(sampling.stop)
        plain(self, model, sampling, **more)

    monkeypatch.setattr(Generator, "__init__", noted)
    stop = {"kv_cache": "fp32", "batch": 3, "stop": ["\n", "<|endoftext|>", 5]}
    tokenizer = str(folder_of(tmp_path / "model") / "tokenizer.json")
    recipe = policy(objective={**GRPO, "rollout": stop})
    newline = Tokenizer.from_file(tokenizer).encode("\n").ids
    trained(recipe, options_for(tmp_path / "run", 1, tokenizer=tokenizer))
    assert made == [(256, *newline, 5)]
    assert recipe.id != policy().id
    assert policy(objective={**GRPO, "rollout": {**stop, "stop": []}}).id == policy().id
    one = policy(objective={**GRPO, "rollout": {**stop, "stop": "\n"}}).objective
    assert one.rollout.stop == ("\n",)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("stop", "says"),
    [
        (["\n\n"], r"writes it as 2 tokens, .*use the text or the id of one token"),
        ([257], "the model has 257 tokens; use a smaller id"),
        ([-1], "objective.rollout.stop"),
        ([""], "objective.rollout.stop"),
        ([True], "objective.rollout.stop"),
    ],
)
def test_what_is_refused(stop: list[Any], says: str, tmp_path: Path) -> None:
    rollout = {"kv_cache": "fp32", "batch": 3, "stop": stop}
    with pytest.raises(InputError, match=says):
        trained(policy(objective={**GRPO, "rollout": rollout}), options_for(tmp_path / "run", 1))
