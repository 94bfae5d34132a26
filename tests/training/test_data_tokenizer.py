"""A given tokenizer.json: each document is encoded whole and unchanged, or a note names the loss."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from tiny_training import Listener, options_for, tiny
from trainfit.spec.errors import InputError
from trainfit.training import durable
from trainfit.training.corpus import Corpora, open_corpora
from trainfit.training.loop import train
from trainfit.training.options import SyntheticData, TextData, TrainOptions
from trainfit.training.synthetic import synthetic_text
from trainfit.training.tokenizer import load_tokenizer, train_tokenizer

TEXTS = [synthetic_text(0, index).text for index in range(200)]
VOCABULARY, SEQ = 500, 32


def options(tmp_path: Path, tokenizer: Tokenizer, data: str = "", share: float = 0.1) -> TrainOptions:
    path, text = tmp_path / "tokenizer.json", tmp_path / "a.txt"
    tokenizer.save(str(path))
    text.write_text(data)
    spec = TextData(path=str(text), separator="\n") if data else SyntheticData(num_documents=200)
    return TrainOptions(out=str(tmp_path), data=spec, eval_fraction=share, tokenizer=str(path))


def opened(tmp_path: Path, given: TrainOptions, vocabulary: int = VOCABULARY, seq: int = SEQ) -> Corpora:
    return open_corpora(tmp_path / "data", given, vocabulary=vocabulary, seq=seq)


def plain() -> Tokenizer:
    return train_tokenizer(TEXTS, 400)


def template(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens(["<s>"])
    start = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A <s>", special_tokens=[("<s>", start)]
    )


def dropout(tokenizer: Tokenizer) -> None:
    tokenizer.model.dropout = 0.25


CHANGES: dict[str, tuple[Callable[[Tokenizer], object], str | None]] = {
    "truncation": (lambda tokenizer: tokenizer.enable_truncation(2), "truncation (max_length 2)"),
    "padding": (lambda tokenizer: tokenizer.enable_padding(pad_id=0, length=512), "padding"),
    "dropout": (dropout, "dropout (0.25)"),
    "template": (template, None),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_tokens_are_those_of_the_whole_documents(name: str, tmp_path: Path):
    change, words = CHANGES[name]
    tokenizer = plain()
    end = tokenizer.token_to_id("<|endoftext|>")
    expected = [[*tokenizer.encode(text, add_special_tokens=False).ids, end] for text in TEXTS]
    change(tokenizer)
    given = options(tmp_path, tokenizer)
    corpora = opened(tmp_path, given)
    found = np.sort(np.concatenate([corpora.train.tokens, corpora.eval.tokens]))
    assert found.tolist() == sorted(token for ids in expected for token in ids)
    assert [words in note for note in corpora.index.notes] == ([] if words is None else [True])
    index = json.loads((tmp_path / "data" / "index.json").read_text())
    assert tuple(index["notes"]) == corpora.index.notes
    saved = load_tokenizer(tmp_path / "data" / "tokenizer.json")
    assert saved[1] == [], "the tokenizer that made the tokens is kept"
    assert opened(tmp_path, given).index.notes == corpora.index.notes


def test_a_run_notes_what_is_switched_off_in_one_line(tmp_path: Path):
    tokenizer = plain()
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    given = options_for(tmp_path / "run", 1, tokenizer=str(tmp_path / "tokenizer.json"), tensorboard=False)
    listener = Listener()
    summary = train(tiny("model.config.vocab_size=400"), given, observers=[listener])
    expected = "switched off in tokenizer.json: truncation (max_length 16) and padding"
    assert [expected in note for note in listener.run.notes] == [True]
    assert summary.content()["run"]["notes"] == list(listener.run.notes)


def test_tokens_that_an_older_version_cut_are_not_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A folder whose tokens were made while truncation was on, as trainfit did."""
    tokenizer = plain()
    tokenizer.enable_truncation(40)
    given = options(tmp_path, tokenizer)
    monkeypatch.setattr(
        "trainfit.training.tokenizer.load_tokenizer", lambda path: (Tokenizer.from_file(str(path)), [])
    )
    monkeypatch.setattr("trainfit.training.data.cache.key", lambda *_: None)
    cut = opened(tmp_path, given)
    assert cut.index.train.tokens + cut.index.eval.tokens == 41 * len(TEXTS)
    monkeypatch.undo()
    with pytest.raises(InputError, match="max_length 40") as caught:
        opened(tmp_path, given)
    assert "another folder" in str(caught.value)


def test_a_folder_of_before_the_notes_goes_on(tmp_path: Path):
    given = options(tmp_path, plain())
    opened(tmp_path, given)
    index = tmp_path / "data" / "index.json"
    kept = {key: value for key, value in json.loads(index.read_text()).items() if key != "notes"}
    durable.write_json(index, kept)
    (tmp_path / "data" / "manifest.json").unlink()
    durable._seal(tmp_path / "data")
    assert opened(tmp_path, given).index.notes == ()


# Text that the tokenizer loses.

WORDS = [f"{index:b}".translate({48: "a", 49: "b"}) for index in range(300)]
LINES = "\n".join(f"abc {word} cé b\u0301a" for word in WORDS)
NUM_CHARACTERS = sum(len(line) for line in LINES.splitlines())


def bpe(**settings: object) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(["</s>", "<unk>", "a", "b", "c"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], **settings))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def without_pre_tokenizer() -> Tokenizer:
    return Tokenizer.from_str(json.dumps(json.loads(bpe().to_str()) | {"pre_tokenizer": None}))


def strip_accents() -> Tokenizer:
    tokenizer = bpe()
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
    return tokenizer


SPACES = "' ' (900)"
LOSSES = {
    "no token": (bpe, f"{SPACES}, '\u0301' (600), 'e' (300)", 1800),
    "no pre-tokenizer": (without_pre_tokenizer, f"{SPACES}, '\u0301' (600), 'e' (300)", 1800),
    "normalizer": (strip_accents, f"{SPACES}, '\u0301' (600), 'e' (300)", 1800),
    "unknown token": (lambda: bpe(unk_token="<unk>"), SPACES, 900),
}


@pytest.mark.parametrize("name", LOSSES)
def test_characters_that_a_round_trip_loses_are_noted(name: str, tmp_path: Path):
    make, most, count = LOSSES[name]
    corpora = opened(tmp_path, options(tmp_path, make(), LINES), vocabulary=8, seq=8)
    characters = f"{count:,} of the text's {NUM_CHARACTERS:,} characters"
    lost = f"the tokenizer leaves out {characters}, most often {most}"
    total = corpora.index.train.tokens + corpora.index.eval.tokens
    unknown = [f"600 of {total:,} tokens are the tokenizer's unknown token"]
    assert list(corpora.index.notes) == [*(unknown if name == "unknown token" else []), lost]


def deleting(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Replace("e", "")


def lower(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Lowercase()


def no_decoder(tokenizer: Tokenizer) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(json.loads(tokenizer.to_str()) | {"decoder": None}))


def words(tokenizer: Tokenizer) -> Tokenizer:
    found = Tokenizer(models.WordLevel({"</s>": 0, "one": 1, "two": 2, "?": 3}, "?"))
    found.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return found


@pytest.mark.parametrize(
    ("change", "text", "lost"),
    [
        (deleting, "one\ntree", "3 of the text's 7 characters, most often 'e' (3)"),
        (lower, "One\nTwo", None),
        (no_decoder, "one two\nthree", None),
        (words, "one two\ntwo", None),
        (words, "one  two\ntwo", "1 of the text's 11 characters, most often ' ' (1)"),
    ],
)
def test_only_characters_that_are_gone_count_as_lost(
    change: Callable, text: str, lost: str | None, tmp_path: Path
):
    tokenizer = plain()
    tokenizer = change(tokenizer) or tokenizer
    corpora = opened(tmp_path, options(tmp_path, tokenizer, text, share=0.0), seq=2)
    assert corpora.index.notes == (() if lost is None else (f"the tokenizer leaves out {lost}",))


def test_text_that_cannot_be_encoded_is_refused_in_one_line(tmp_path: Path):
    unigram = models.Unigram([("</s>", -1.0), ("a", -1.0), ("abc", -1.0)], None, False)
    for model in (models.WordLevel({"</s>": 0, "abc": 1}), unigram):
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        with pytest.raises(InputError, match="cannot encode") as caught:
            opened(tmp_path, options(tmp_path, tokenizer, LINES), vocabulary=8, seq=8)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "data").exists()


def test_a_named_pipe_is_refused(tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for change in ({"tokenizer": str(pipe)}, {"data": TextData(path=str(pipe))}):
        given = options(tmp_path, plain()).model_copy(update=change)
        with pytest.raises(InputError, match=r"is a named pipe.*regular file"):
            opened(tmp_path, given)
