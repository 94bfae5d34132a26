"""Documents: synthetic texts, text files and folders, separators, the split by hash."""

import hashlib
import importlib.util
import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import trainfit
from trainfit.spec.errors import InputError
from trainfit.training import documents
from trainfit.training.documents import MAX_DOCUMENT_CHARS, for_evaluation
from trainfit.training.options import HubData, SyntheticData, TextData, data_from
from trainfit.training.synthetic import synthetic_text


def test_a_synthetic_text_never_changes():
    # The choices come from SHAKE-256 alone; with another text old runs could not be repeated.
    text = synthetic_text(0, 0).text
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "3928a943fc3bcdad"
    assert len({text, synthetic_text(0, 1).text, synthetic_text(1, 0).text}) == 3


def test_synthetic_texts_have_the_entropy_they_state():
    # 4,000 texts of at least 2**30 equally likely ones: by the birthday bound none repeats (p < 1 %).
    texts = [synthetic_text(0, index) for index in range(4000)]
    assert min(each.bits for each in texts) > 30
    assert len({each.text for each in texts}) == len(texts)
    # One choice of two, equally likely, picks the kind of text: 4 standard deviations around a half.
    errands = sum("wanted to cook" in each.text for each in texts)
    assert abs(errands - 2000) < 4 * math.sqrt(4000) / 2
    # The split: binomial (4000, 0.1), 4 standard deviations are 76; a larger share keeps a smaller one's.
    kept = [each.text for each in texts if for_evaluation(each.text, 0.1)]
    assert abs(len(kept) - 400) < 76
    assert all(for_evaluation(text, 0.2) for text in kept)
    assert not any(for_evaluation(each.text, 0.0) for each in texts)


def test_facts_of_a_synthetic_text_agree():
    for index in range(200):
        text = synthetic_text(3, index).text
        if "wanted to cook" in text:
            sold = text.split("for the ")[1].split('"')[0].rstrip(",")
            assert f"sold the {sold}" in text
            assert f"a new {sold}" in text


def read(path: Path, content: str, **options: Any) -> list[str]:
    path.write_text(content)
    return list(documents.documents(TextData(path=str(path), **options)))


def test_files_of_a_folder_in_order_without_hidden_ones(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.jsonl").write_text('{"text": "first"}\n\n{"text": "then"}\n')
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "c.txt").write_text("hidden")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    assert list(documents.documents(TextData(path=str(tmp_path)))) == ["first", "then", "second"]


@pytest.mark.parametrize("read_chars", [7, 64, 1 << 20])
def test_separators_cut_whatever_the_buffer(tmp_path, monkeypatch, read_chars):
    monkeypatch.setattr(documents, "READ_CHARS", read_chars)
    path, text = tmp_path / "a.txt", "one\n--end--\ntwo\n\nstill two--end----end--\nthree"
    assert read(path, text, separator="--end--") == ["one", "two\n\nstill two", "three"]
    if read_chars > 64:  # The end token separates if the first characters read have it.
        assert read(path, "one\n\nstill one<|endoftext|>two") == ["one\n\nstill one", "two"]


@pytest.mark.parametrize("read_chars", [1000, 1 << 20])
def test_a_file_without_separators_is_cut_at_blank_lines(tmp_path, monkeypatch, read_chars):
    monkeypatch.setattr(documents, "READ_CHARS", read_chars)
    paragraph = "word " * 100
    found = read(tmp_path / "a.txt", "\n\n".join([paragraph.strip()] * 40))
    assert len(found) > 5
    assert all(len(text) >= documents.DOCUMENT_CHARS for text in found[:-1])
    assert " ".join(" ".join(found).split()) == " ".join((paragraph * 40).split())


def test_text_without_any_boundary_is_not_held_whole(tmp_path):
    found = read(tmp_path / "a.txt", "x" * (3 * MAX_DOCUMENT_CHARS + 5))
    assert [len(text) for text in found] == [*[MAX_DOCUMENT_CHARS] * 3, 5]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", b"caf\xe9", "not UTF-8"),
        ("a.jsonl", b'{"text": 3}\n', "line 1 has no text"),
        ("a.jsonl", b'{"text": "fine"}\nnot json\n', "line 2 is not JSON"),
        ("a.jsonl", b"[1]\n", "line 1 is no JSON object"),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path, name, content, says):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=says) as refused:
        list(documents.documents(TextData(path=str(tmp_path))))
    assert refused.value.file == str(path)


def test_data_from_a_command_line(tmp_path):
    assert data_from("stories") == SyntheticData()
    assert data_from("stories:70") == SyntheticData(num_documents=70)
    assert data_from("hub:a/b") == HubData(name="a/b")
    assert data_from(str(tmp_path)) == TextData(path=str(tmp_path))
    for wrong in ("stories:-1", "stories:many", "hub:", str(tmp_path / "absent")):
        with pytest.raises(InputError):
            data_from(wrong)


@pytest.mark.skipif(importlib.util.find_spec("datasets") is not None, reason="datasets is installed here")
def test_without_the_datasets_library_one_line_says_what_to_install():
    with pytest.raises(InputError, match=r"trainfit\[datasets\]"):
        list(documents.documents(HubData(name="roneneldan/TinyStories")))


def test_hub_rows_and_errors_with_a_library_of_that_form(monkeypatch):
    fake = types.ModuleType("datasets")
    fake.__spec__ = importlib.util.spec_from_loader("datasets", None)
    rows = [{"text": "one "}, {"text": " "}, {"text": "two"}]
    fake.load_dataset = lambda name, config, split, streaming: iter(rows)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert list(documents.documents(HubData(name="a/b"))) == ["one", "two"]
    assert list(documents.documents(HubData(name="a/b", max_documents=1))) == ["one"]
    with pytest.raises(InputError, match="use one of text"):
        list(documents.documents(HubData(name="a/b", column="body")))

    def unreachable(*args, **kwargs):
        raise ConnectionError("no route to host\nmore")

    fake.load_dataset = unreachable
    with pytest.raises(InputError, match="no route to host") as refused:
        list(documents.documents(HubData(name="a/b")))
    assert "more" not in str(refused.value)


def test_the_first_record_is_read_before_the_step_is_predicted(tmp_path, monkeypatch):
    """What is wrong with the whole file shows at once; a prediction takes seconds."""
    file = tmp_path / "data.jsonl"
    file.write_text('{"a": "ok"}\n')
    monkeypatch.setattr(
        "trainfit.api.calls.planned", lambda *_: pytest.fail("planned before the data was read")
    )
    with pytest.raises(InputError, match="line 1 has no text"):
        trainfit.train("gpt2", data=str(file), out=tmp_path / "run", steps=1)
    assert not (tmp_path / "run").exists()
