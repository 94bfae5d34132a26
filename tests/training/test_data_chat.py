"""Conversations: the forms of their rows, which tokens are learned, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chat_data import ANSWERED, ASKED, MESSAGES, PLAIN, TURN, opened, saved_tokenizer, written
from trainfit.spec.data import Data
from trainfit.spec.errors import InputError
from trainfit.training import documents
from trainfit.training.corpus import IGNORED, Corpora, open_corpora
from trainfit.training.data.chat import CHATML
from trainfit.training.data.records import Completion, Conversation, Text
from trainfit.training.data.rows import rows_of_file
from trainfit.training.options import data_from
from trainfit.training.tokenizer import open_tokenizer

LAST_THINKS = PLAIN.replace(
    TURN,
    "{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' and loop.last %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m['content'] + '<|im_end|>\n' }}",
)
"""As Qwen3's: the last answer is written in another way than those before it."""
COUNTS = "{% for m in messages %}{{ loop.length ~ m['content'] }}{% endfor %}"
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
STRICT = "{{ raise_exception('Roles must alternate') }}"


def learned(tmp_path: Path, corpora: Corpora) -> str:
    """Return the text of the learned tokens, in brackets."""
    tokenizer = open_tokenizer(str(tmp_path / "tokenizer"), None).tokenizer
    corpus = corpora.train
    mask = corpus.learned if corpus.learned is not None else np.ones(len(corpus.tokens), np.uint8)
    parts = np.split(corpus.tokens, np.flatnonzero(np.diff(mask)) + 1)
    texts = [tokenizer.decode(part.tolist(), skip_special_tokens=False) for part in parts]
    first = bool(mask[0])
    return "".join(f"[{text}]" if first == (number % 2 == 0) else text for number, text in enumerate(texts))


def test_answers_by_prefixes_are_those_that_a_template_marks(tmp_path):
    chatml = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n[{}<|im_end|>]\n"
    expected = chatml.format(ASKED, ANSWERED) + chatml.format("And now?", "Gone.")
    for number, template in enumerate((PLAIN, None)):
        place = tmp_path / str(number)
        place.mkdir()
        named = {} if template else {"chat_template": "chatml"}
        assert learned(place, opened(place, [{"messages": MESSAGES}], template, **named)) == expected


def test_marked_answers_are_the_assistant_masks_of_transformers(tmp_path):
    from transformers import AutoTokenizer

    corpus = opened(tmp_path, [{"messages": MESSAGES}], CHATML).train
    expected = AutoTokenizer.from_pretrained(tmp_path / "tokenizer").apply_chat_template(
        MESSAGES, return_assistant_tokens_mask=True, return_dict=True, tokenize=True
    )
    assert corpus.tokens.tolist() == expected["input_ids"]
    assert corpus.learned.tolist() == expected["assistant_masks"]


def test_a_template_that_writes_the_last_turn_differently(tmp_path):
    found = learned(tmp_path, opened(tmp_path, [{"messages": MESSAGES}], LAST_THINKS))
    assert f"[{ANSWERED}<|im_end|>]\n" in found
    assert found.endswith("[<think>\n\n</think>\n\nGone.<|im_end|>]\n")


@pytest.mark.parametrize(
    ("row", "template", "says"),
    [
        ({"messages": MESSAGES}, COUNTS, "line 1: the chat template writes message 2 differently"),
        ({"messages": MESSAGES}, None, "has no chat template"),
        ({"messages": MESSAGES}, STRICT, "refuses it .Roles must alternate"),
        ({"messages": MESSAGES[:1]}, PLAIN, "line 1 has no answer"),
        ({"messages": [MESSAGES[0], CALL]}, PLAIN, "line 1 has tool_calls, which the chat template does not"),
        ({"messages": MESSAGES, "tools": [{"name": "f"}]}, PLAIN, "line 1 has tools, which"),
        ({"messages": []}, PLAIN, "messages that is an empty list"),
        ({"messages": "hello"}, PLAIN, "text, not messages"),
        ({"messages": [{"role": 3, "content": "x"}]}, PLAIN, "message 1 of messages without a role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, PLAIN, "with image"),
        ({"conversations": [{"from": "robot", "value": "x"}]}, PLAIN, "from 'robot'"),
        ({"prompt": "Say", "completion": " "}, PLAIN, "an empty completion"),
        ({"instruction": 3, "output": "x"}, PLAIN, "that is no text"),
        ({"question": "a", "answer": "b"}, PLAIN, "none of its columns .question, answer"),
    ],
)
def test_what_cannot_be_labelled_is_refused_by_its_place(tmp_path, row, template, says):
    with pytest.raises(InputError, match=says) as refused:
        opened(tmp_path, [row], template)
    assert "rows.jsonl" in str(refused.value) or template is None
    assert "\n" not in str(refused.value)


def test_forms_of_rows_become_conversations(tmp_path):
    def record(row: dict[str, Any], **more: Any) -> Any:
        source = written(tmp_path / "rows.json", [row]).model_copy(update=more)
        return next(documents.records(source))

    expected = (MESSAGES[0], MESSAGES[1])
    share = [{"from": "human", "value": ASKED}, {"from": "gpt", "value": ANSWERED}]
    for row in (
        {"messages": list(expected)},
        {"conversations": share},
        {"instruction": ASKED, "input": "", "output": ANSWERED},
        {"prompt": [MESSAGES[0]], "completion": [MESSAGES[1]]},
    ):
        assert record(row).messages == expected
        assert record(row, format="chat").messages == expected
    pair = record({"prompt": "a", "completion": "b"})
    assert isinstance(pair, Completion)
    assert (pair.prompt, pair.completion) == ("a", "b")
    assert isinstance(record({"text": "only", "messages": []}), Text)
    assert record({"messages": list(expected), "mine": "x"}, column="mine").text == "x"
    tools = [{"type": "function", "function": {"name": "f"}}]
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    found = record({"messages": [MESSAGES[0], called], "tools": json.dumps(tools)})
    assert isinstance(found, Conversation)
    assert found.tools == tuple(tools)
    assert found.messages[1]["tool_calls"] == called["tool_calls"]


def test_messages_of_weight_0_are_not_learned(tmp_path):
    rows = [{"messages": [MESSAGES[0], {**MESSAGES[1], "weight": 0}, *MESSAGES[2:]]}]
    found = learned(tmp_path, opened(tmp_path, rows, None, chat_template="chatml"))
    assert ANSWERED in found
    assert f"[{ANSWERED}" not in found
    assert "[Gone.<|im_end|>]" in found


def test_prompts_fill_no_sequence_alone(tmp_path):
    """A sequence without a label has no loss: its mean would be NaN."""
    rows = [{"prompt": "word " * 200, "completion": "yes"}] * 3
    for pack in (True, "documents"):
        place = tmp_path / str(pack)
        place.mkdir()
        corpus = opened(place, rows, seq=32, pack=pack).train
        assert 0 < len(corpus) < len(corpus.tokens) // 32
        batch = corpus.batch(np.arange(len(corpus)))
        counts = (batch["labels"][:, 1:] != IGNORED).sum(1)
        assert counts.tolist() == corpus.num_labels(np.arange(len(corpus))).tolist()
        assert counts.min() > 0
    place = tmp_path / "false"
    place.mkdir()
    with pytest.raises(InputError, match="nothing to learn in sequences of 32"):
        opened(place, rows, seq=32, pack=False)


def test_packed_documents_are_whole_and_their_positions_begin_anew(tmp_path):
    texts = [{"text": "x" * length} for length in (3, 40, 9, 70, 5)]
    corpora = opened(tmp_path, texts, seq=32, pack="documents")
    corpus = corpora.train
    batch = corpus.batch(np.arange(len(corpus)))
    assert batch["input_ids"].shape == batch["labels"].shape == batch["position_ids"].shape
    begins = batch["position_ids"] == 0
    assert (batch["labels"][begins] == IGNORED).all(), "nothing precedes a document's first token"
    held = sum(int(length) for length in corpus.pieces.length)
    assert held == len(corpus.tokens)
    assert (np.diff(batch["position_ids"], axis=1)[~begins[:, 1:]] == 1).all()
    # Pieces of 32 + 10, 32 + 32 + 8, 11, 6 and 4 tokens or fewer: no more than one sequence of padding.
    assert len(corpus) <= -(-held // 32) + 1


def test_a_sequence_a_document_is_cut_or_padded(tmp_path):
    corpus = opened(tmp_path, [{"text": "abc"}, {"text": "defgh " * 30}], seq=16, pack=False).train
    batch = corpus.batch(np.array([0, 1]))
    length = int(corpus.starts[1])
    assert batch["labels"][0, :length].tolist() == [IGNORED, *corpus.tokens[1:length].tolist()]
    assert (batch["labels"][0, length:] == IGNORED).all()
    assert batch["input_ids"][1].tolist() == corpus.tokens[length : length + 16].tolist()
    assert corpus.padding == pytest.approx((16 - length) / 32)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", b'{"text": "fine"}\n{"text": "bro', "line 2 is not JSON"),
        ("a.jsonl", b'{"text": "\xff"}', "not UTF-8"),
        ("a.jsonl", b'{"text": "a\\ud800"}', "lone surrogate"),
        ("a.jsonl", b'{"text": "\x00"}', "line 1 is not JSON"),
        ("a.json", b'[{"text": "a"}, {"text": ', "row 2 is not JSON"),
        ("a.json", b'[{"text": "a"}', "array has no end"),
        ("a.json", b'[{"text": "a"}, 3, 4]', "row 2 is no JSON object"),
        ("a.parquet", b"PAR1 no", "pip install 'trainfit|not a Parquet file"),
    ],
)
def test_broken_rows_are_named(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=says):
        list(documents.records(data_from(str(tmp_path / name))))


@pytest.mark.parametrize("read_chars", [7, 1 << 20])
def test_an_array_is_read_object_by_object(tmp_path, monkeypatch, read_chars):
    monkeypatch.setattr("trainfit.training.data.rows.READ_CHARS", read_chars)
    rows = [{"text": "a]}[{" * n, "n": n, "x": [n, {"y": n}]} for n in range(9)]
    (tmp_path / "rows.json").write_text(json.dumps(rows, indent=2))
    assert [row for _, row in rows_of_file(tmp_path / "rows.json")] == rows
    (tmp_path / "rows.json").write_text("\n".join(map(json.dumps, rows)))
    assert [row for _, row in rows_of_file(tmp_path / "rows.json")] == rows


def test_equal_data_is_tokenized_once(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path / "cache"))
    rows = [{"messages": MESSAGES}] * 3
    first = opened(tmp_path, rows)
    (tmp_path / "data").rename(tmp_path / "before")
    monkeypatch.setattr("trainfit.training.corpus._write", None)
    again = opened(tmp_path, rows)
    assert np.array_equal(first.train.tokens, again.train.tokens)
    (kept,) = (tmp_path / "cache" / "tokens").iterdir()
    content = bytearray((kept / "train.bin").read_bytes())
    (kept / "train.bin").unlink()  # Linked files share their bytes.
    (kept / "train.bin").write_bytes(content[:-2])
    monkeypatch.undo()
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").rename(tmp_path / "again")
    assert np.array_equal(opened(tmp_path, rows).train.tokens, first.train.tokens)


def test_held_out_data_of_its_own(tmp_path):
    given = {"train": str(tmp_path / "train.txt"), "eval": str(tmp_path / "eval.txt")}
    (tmp_path / "train.txt").write_text("one two three " * 200)
    (tmp_path / "eval.txt").write_text("four five six " * 50)
    from trainfit.training.options import train_options

    section = Data(**given)
    options = train_options(None, section, out=str(tmp_path))
    corpora = open_corpora(tmp_path / "data", options, vocabulary=300, seq=16, data=section)
    assert (corpora.index.train.documents, corpora.index.eval.documents) == (1, 1)
    with pytest.raises(InputError, match=r"data\.eval = '/no/such'"):
        train_options(None, Data(eval="/no/such"), out=str(tmp_path))


def test_weights_bring_their_tokenizer(tmp_path):
    from trainfit.training.options import train_options

    given = saved_tokenizer(tmp_path / "weights", PLAIN)
    (tmp_path / "alone").mkdir()
    for weights, own, expected in (
        (given, None, given), (given, "mine", "mine"), ("random", None, None),
        (str(tmp_path / "alone"), None, None),
    ):  # fmt: skip
        options = train_options(None, Data(tokenizer=own), weights=weights, out=str(tmp_path))
        assert options.tokenizer == expected
