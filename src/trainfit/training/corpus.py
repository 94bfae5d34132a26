"""Tokenised documents on disk, memory-mapped, read as packed sequences of equal length.

Enters: a DataSpec and a vocabulary size. Leaves: ``data/`` in the run's folder: ``tokenizer.json``, ``train.bin`` and
``eval.bin`` (token ids one after another, the end token after each document) and ``index.json``. Written once, reused
on resume after every byte has been checked.
Shapes: n sequences, s tokens each; sequence i is tokens [i*s, (i+1)*s), so documents run across its ends.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from trainfit.spec.errors import InputError
from trainfit.spec.storage import writing
from trainfit.training import documents, durable
from trainfit.training.options import TrainOptions
from trainfit.training.tokenizer import (
    ADD_UNKNOWN,
    CANNOT_ENCODE,
    end_token,
    left_out,
    library,
    load_tokenizer,
    train_tokenizer,
    unknown_token,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SIDES = ("train", "eval")
INDEX, TOKENIZER = "index.json", "tokenizer.json"
DTYPES = ("uint16", "uint32")
DOCUMENTS_AT_ONCE = 512


@dataclass(frozen=True)
class Corpus:
    """One side of the split: ``tokens`` as they lie on disk, cut in sequences of ``seq``."""

    tokens: np.ndarray
    seq: int

    def __len__(self) -> int:
        return len(self.tokens) // self.seq

    def sequences(self, indices: np.ndarray) -> np.ndarray:
        """The sequences with these numbers, int64 [len(indices), s]."""
        rows = indices[:, None] * self.seq + np.arange(self.seq)
        return self.tokens[rows].astype(np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        """A file's tokens go to another process by the file's name."""
        if isinstance(self.tokens, np.memmap):
            return _mapped, (str(self.tokens.filename), self.tokens.dtype.str, self.seq)
        return Corpus, (self.tokens, self.seq)


@dataclass(frozen=True)
class Corpora:
    """Both sides, and what people want to know about them."""

    train: Corpus
    eval: Corpus
    index: dict[str, Any]

    @property
    def notes(self) -> tuple[str, ...]:
        """What the tokenizer did to the text besides encoding it, or would have done, one line each."""
        return tuple(self.index.get("notes", ()))


def open_corpora(folder: Path, options: TrainOptions, *, vocabulary: int, seq: int) -> Corpora:
    """The run's data, made on the first call and checked on later ones.

    Raises:
        InputError: bad data; too little of it for one sequence; a token id the model has no row for; data that
            changed since the run began.
    """
    identity = {
        "data": documents.fingerprint(options.data),
        "eval_fraction": options.eval_fraction,
        "tokenizer": None if options.tokenizer is None else _file_digest(Path(options.tokenizer)),
        "vocabulary": vocabulary,
    }
    if folder.exists():
        durable.check_folder(folder)
        _same_data(folder, identity)
        corpora = _open(folder, seq)
        _refuse_foreign_ids(corpora, folder, vocabulary)
        return corpora
    else:
        with durable.new_folder(folder) as work:
            _make(work, options, identity, vocabulary)
            _enough(_open(work, seq), options)
    return _open(folder, seq)


def _open(folder: Path, seq: int) -> Corpora:
    index = _checked_index(folder)
    train, held_out = (Corpus(_tokens(folder, side, index), seq) for side in SIDES)
    return Corpora(train, held_out, index)


def _checked_index(folder: Path) -> dict[str, Any]:
    """``index.json``, if it describes the files beside it.

    Raises:
        InputError: it does not.
    """
    index = durable.read_json(folder / INDEX)
    try:
        for side in SIDES:
            size = (folder / f"{side}.bin").stat().st_size
            good = (
                index["dtype"] in DTYPES and size == index[side]["tokens"] * np.dtype(index["dtype"]).itemsize
            )
            if not good or type(index[side]["documents"]) is not int:
                raise ValueError(side)
        if type(index["tokenizer_tokens"]) is not int or not isinstance(index["identity"], dict):
            raise ValueError("tokenizer_tokens")
    except (KeyError, TypeError, ValueError):
        remedy = "restore it from a copy, or start a new run in another folder"
        raise InputError("not what trainfit wrote", remedy, file=str(folder / INDEX)) from None
    return index


def _refuse_foreign_ids(corpora: Corpora, folder: Path, vocabulary: int) -> None:
    for side, corpus in zip(SIDES, (corpora.train, corpora.eval), strict=True):
        if len(corpus.tokens) and int(corpus.tokens.max()) >= vocabulary:
            problem = f"holds token id {int(corpus.tokens.max())}, the model's vocabulary has {vocabulary}"
            remedy = "restore it from a copy, or start a new run in another folder"
            raise InputError(problem, remedy, file=str(folder / f"{side}.bin"))


def _mapped(file: str, dtype: str, seq: int) -> Corpus:
    return Corpus(np.memmap(file, dtype=dtype, mode="r"), seq)


def _make(work: Path, options: TrainOptions, identity: dict[str, Any], vocabulary: int) -> None:
    switched_off: tuple[str, ...] = ()
    if options.tokenizer is None:
        tokenizer = train_tokenizer(_training_side(options), vocabulary)
    else:
        tokenizer, switched_off = load_tokenizer(Path(options.tokenizer))
    with writing(work / TOKENIZER):
        tokenizer.save(str(work / TOKENIZER))
    dtype = "uint16" if vocabulary <= 2**16 else "uint32"
    with (
        writing(work),
        (work / "train.bin").open("wb") as train,
        (work / "eval.bin").open("wb") as held_out,
    ):
        counts, losses = _tokenize(options, tokenizer, (train, held_out), dtype, vocabulary)
    if counts["train"]["documents"] + counts["eval"]["documents"] == 0:
        raise InputError(
            "the data has no text", "give some", field="data", value=identity["data"].get("path")
        )
    index = {
        "identity": identity,
        "dtype": dtype,
        "tokenizer_tokens": tokenizer.get_vocab_size(),
        "notes": [*_switched_off_note(switched_off), *losses],
        **counts,
    }
    durable.write_json(work / INDEX, index)


def _switched_off_note(switched_off: tuple[str, ...]) -> list[str]:
    if not switched_off:
        return []
    names = " and ".join(switched_off)
    return [f"switched off in tokenizer.json: {names}; every document is tokenized whole and as it is"]


def _training_side(options: TrainOptions) -> Iterator[str]:
    """The tokenizer must not see the evaluation documents either."""
    return (
        text
        for text in documents.documents(options.data)
        if not documents.for_evaluation(text, options.eval_fraction)
    )


def _tokenize(
    options: TrainOptions,
    tokenizer: "Tokenizer",
    files: tuple[BinaryIO, BinaryIO],
    dtype: str,
    vocabulary: int,
) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Write the tokens of both sides; return their counts, and a line for each way in which text was lost."""
    end, unknown = end_token(tokenizer), unknown_token(tokenizer)
    counts = {side: {"documents": 0, "tokens": 0} for side in SIDES}
    num_unknown, characters = 0, set[str]()
    stream = documents.documents(options.data)
    while texts := list(islice(stream, DOCUMENTS_AT_ONCE)):
        for text, encoded in zip(texts, _encoded(tokenizer, texts, options), strict=True):
            ids = np.array([*encoded, end], dtype=np.int64)
            if ids.max() >= vocabulary:
                raise InputError(
                    f"the tokenizer gives token id {ids.max()}, the model's vocabulary has {vocabulary}",
                    "use the model's own tokenizer, or a config with a larger vocab_size",
                    field="tokenizer",
                    value=options.tokenizer,
                )
            held_out = documents.for_evaluation(text, options.eval_fraction)
            files[held_out].write(ids.astype(dtype).tobytes())
            counts[SIDES[held_out]]["documents"] += 1
            counts[SIDES[held_out]]["tokens"] += len(ids)
            if unknown is not None:
                num_unknown += int((ids[:-1] == unknown).sum())
            characters.update(text)
    num_tokens = sum(count["tokens"] for count in counts.values())
    return counts, _lost_text(num_unknown, num_tokens, left_out(tokenizer, characters))


def _encoded(tokenizer: "Tokenizer", texts: list[str], options: TrainOptions) -> list[list[int]]:
    """Return the token ids of each text, without the special tokens of the file's template.

    Raises:
        InputError: a text that the tokenizer has no tokens for.
    """
    with library(options.tokenizer, CANNOT_ENCODE, ADD_UNKNOWN):
        return [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]


def _lost_text(num_unknown: int, num_tokens: int, lost: str) -> list[str]:
    notes: list[str] = []
    if num_unknown:
        notes.append(f"{num_unknown:,} of {num_tokens:,} tokens are the tokenizer's unknown token")
    if lost:
        some = ", ".join(repr(character) for character in lost[:3])
        notes.append(f"the tokenizer leaves {len(lost):,} of the text's characters out, such as {some}")
    return notes


def _tokens(folder: Path, side: str, index: dict[str, Any]) -> np.ndarray:
    if index[side]["tokens"] == 0:  # An empty file cannot be mapped.
        return np.empty(0, dtype=index["dtype"])
    return np.memmap(folder / f"{side}.bin", dtype=index["dtype"], mode="r")


def _same_data(folder: Path, identity: dict[str, Any]) -> None:
    """Refuse to go on with tokens of other data, or with tokens that a tokenizer.json cut or padded.

    The folder's own tokenizer.json is the one its tokens were made with.
    """
    if switched_off := load_tokenizer(folder / TOKENIZER).switched_off:
        raise InputError(
            f"the run's tokens were made with tokenizer.json's {' and '.join(switched_off)}, now switched off",
            "start a new run in another folder",
            field="tokenizer",
        )
    made_of = _checked_index(folder)["identity"]
    for field, value in identity.items():
        if made_of.get(field) != value:
            raise InputError(
                f"the run was started with other data ({field} differs)",
                "give the data it was started with, or start a new run in another folder",
                field=field,
            )


def _enough(corpora: Corpora, options: TrainOptions) -> None:
    sides = [("training", corpora.train)] + ([("evaluation", corpora.eval)] if options.eval_fraction else [])
    for name, corpus in sides:
        if not len(corpus):
            more = ", raise eval_fraction, or set it to 0" if name == "evaluation" else ""
            raise InputError(
                f"{len(corpus.tokens):,} tokens of {name} text are fewer than one sequence of {corpus.seq:,}",
                f"give more text, lower batch.seq{more}",
                field="data",
            )


def _file_digest(path: Path) -> str:
    if not path.is_file():
        raise InputError("no such file", "name a tokenizer.json", field="tokenizer", value=str(path))
    return durable.sha256(path)
