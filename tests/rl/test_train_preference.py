"""``train`` of preferences: data, logs, resume, and what is refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tiny_preferences import LORA, options_for, preference, trained, write_pairs
from trainfit.api.exports import export
from trainfit.cli.main import main
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe
from trainfit.training import documents
from trainfit.training.corpus import open_corpora
from trainfit.training.data.plan import RunData
from trainfit.training.data.records import Completion, Conversation, Pair
from trainfit.training.options import TextData


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("data") / "pairs.jsonl")


def test_logs_of_steps_and_evaluations(data: Path, tmp_path: Path) -> None:
    found = trained(tmp_path / "run", data, 8, {}, eval_every=4)
    assert found["losses"][0] == pytest.approx(0.6931, abs=1e-4)
    steps = [line for line in found["log"] if line["kind"] == "step"]
    for line in steps:
        assert line["reward_margin"] == pytest.approx(line["reward_chosen"] - line["reward_rejected"])
    assert steps[-1]["reward_accuracy"] == 1
    last = [line for line in found["log"] if line["kind"] == "eval"][-1]
    assert last["loss"] < 0.6
    assert last["reward_accuracy"] > 0.9
    assert "perplexity" not in last
    export(tmp_path / "run", tmp_path / "model")
    assert re.search(r"evaluation loss.*accuracy \d", (tmp_path / "model" / "README.md").read_text())


@pytest.mark.parametrize("fields", [{}, LORA, {"loader": {"workers": 1}}], ids=["copy", "lora", "workers"])
def test_a_resumed_run_is_the_unbroken_one_to_the_last_bit(
    data: Path, tmp_path: Path, fields: dict[str, Any]
) -> None:
    """The reference is that of the start, not the model that goes on."""
    fields = {**fields, "batch": {"accumulate": 2}}
    whole = trained(tmp_path / "whole", data, 5, fields)
    first = trained(tmp_path / "run", data, 3, fields)
    second = trained(tmp_path / "run", data, 5, fields, resume=True)
    assert first["losses"] + second["losses"] == whole["losses"]
    assert whole["losses"][1] != pytest.approx(0.6931, abs=1e-4)


def test_a_batch_holds_the_answers_of_each_pair(data: Path, tmp_path: Path) -> None:
    options = options_for(tmp_path / "run", data, 1)
    corpora = open_corpora(tmp_path / "data", options, vocabulary=300, seq=16, pairs=True)
    pairs = [one for one in documents.records(options.data, pairs=True) if isinstance(one, Pair)]
    assert len(corpora.train) + len(corpora.eval) == len(pairs) == 60
    import numpy as np
    from tokenizers import Tokenizer

    batch = corpora.train.batch(np.array([3, 0]))
    assert batch["input_ids"].shape == (4, 16)
    tokenizer = Tokenizer.from_file(str(tmp_path / "data" / "tokenizer.json"))
    texts = [tokenizer.decode(row[row != corpora.train.pad].tolist()) for row in batch["input_ids"]]
    answers = [tokenizer.decode(row[row >= 0].tolist()) for row in batch["labels"]]
    known = {(one.chosen.plain, one.rejected.plain) for one in pairs}
    for at in (0, 2):
        assert tuple(texts[at : at + 2]) in known
        for text, answer in zip(texts[at : at + 2], answers[at : at + 2], strict=True):
            assert text.partition("=")[2] == answer
    found = RunData.of(preference(), corpora)
    assert (found.each, found.documents, found.sequences) == (2, len(corpora.train), len(corpora.train))
    assert found.epoch_tokens == 2 * 16 * len(corpora.train)


MESSAGES = [{"role": "user", "content": "2+2"}]
RIGHT, WRONG = ({"role": "assistant", "content": text} for text in ("4", "5"))
ROWS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"prompt": "2+2=", "chosen": "4", "rejected": "5"}, "2+2=", "4"),
    ({"chosen": "Human: 2+2 Assistant: 4", "rejected": "Human: 2+2 Assistant: 5"},
     "Human: 2+2 Assistant:", " 4"),
    ({"prompt": MESSAGES, "chosen": [RIGHT], "rejected": [WRONG]}, None, "4"),
    ({"chosen": [*MESSAGES, RIGHT], "rejected": [*MESSAGES, WRONG], "score_chosen": 5.0}, None, "4"),
    ({"prompt": "2+2", "chosen": [*MESSAGES, RIGHT], "rejected": [*MESSAGES, WRONG]}, None, "4"),
    ({"prompt": "2+2", "chosen": [RIGHT], "rejected": [WRONG], "messages": [RIGHT]}, None, "4"),
    ({"conversations": [{"from": "human", "value": "2+2"}], "chosen": {"from": "gpt", "value": "4"},
      "rejected": {"from": "gpt", "value": "5"}}, None, "4"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "prompt", "answer"), ROWS, ids=range(len(ROWS)))
def test_forms_of_a_pair(row: dict[str, Any], prompt: str | None, answer: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    (pair,) = documents.records(TextData(path=str(path)), pairs=True)
    assert isinstance(pair, Pair)
    if prompt is not None:
        assert isinstance(pair.chosen, Completion)
        assert (pair.chosen.prompt, pair.chosen.completion) == (prompt, answer)
        assert pair.rejected.prompt == prompt  # type: ignore[union-attr]
        return
    for one, text in ((pair.chosen, "4"), (pair.rejected, "5")):
        assert isinstance(one, Conversation)
        assert [message["content"] for message in one.messages] == ["2+2", text]
        assert one.answers() == [1]


def test_equal_answers_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "chosen": "b", "rejected": "b"}\n')
    assert list(documents.records(TextData(path=str(path)), pairs=True)) == []


BROKEN: list[tuple[str, str, str]] = [
    ("a.jsonl", '{"prompt": "a", "completion": "b"}', "line 1 has no chosen; its columns are prompt"),
    ("a.jsonl", '{"prompt": "a", "chosen": "b", "rejected": [1]}', "of which one is text"),
    ("a.jsonl", '{"prompt": "a", "chosen": " ", "rejected": "b"}', "an empty chosen answer"),
    ("a.jsonl", '{"prompt": [], "chosen": "a", "rejected": "b"}', "write all three alike"),
    ("a.jsonl", '{"chosen": [{"role": "assistant", "content": "a"}], "rejected": '
     '[{"role": "assistant", "content": "b"}]}', "answers without a prompt"),
    ("a.txt", "text", "text has no pairs of answers"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "says"), BROKEN, ids=[says for _, _, says in BROKEN])
def test_rows_that_are_no_pairs(name: str, text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=says):
        documents.require_first(TextData(path=str(tmp_path / name)), pairs=True)


def test_by_the_command_line(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(Recipe.content(preference())))
    assert main(["train", str(recipe), "--data", str(data), "--dry-run"]) == 0
    assert re.search(r"data: \d+ pairs, .* fit in 2 x 16, 2 a step", capsys.readouterr().out)
    assert main(["train", str(recipe), "--out", str(tmp_path / "run")]) == 65
    assert "has no pairs of answers; name a file of prompt, chosen and rejected" in capsys.readouterr().err
    assert main(["predict", str(recipe)]) == 0
    assert "batch 2 pairs x 16" in capsys.readouterr().out
