"""Tokenized documents on disk, memory-mapped and read as packed sequences of equal length.

``data/`` holds ``tokenizer.json``, ``train.bin`` and ``eval.bin`` (token ids, an end token after each
document) and ``index.json``. It is written once; a resumed run verifies every byte and reuses it.
Sequence i is tokens [i*s, (i+1)*s), so documents cross sequence boundaries.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from io import BufferedWriter
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from trainfit.spec.errors import InputError
from trainfit.spec.files import writing
from trainfit.spec.parsing.parse import parse
from trainfit.spec.value import Count, Value
from trainfit.training import documents, durable
from trainfit.training.options import TrainOptions
from trainfit.training.tokenizer import (
    RoundTrip,
    encode,
    end_token,
    load_tokenizer,
    tokenizer_digest,
    train_tokenizer,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SIDES = ("train", "eval")
INDEX, TOKENIZER = "index.json", "tokenizer.json"
DOCUMENTS_AT_ONCE = 512
OTHER_FOLDER = "start a new run in another folder"
RESTORE = f"restore it from a copy, or {OTHER_FOLDER}"


@dataclass(frozen=True)
class Corpus:
    """One side of the split: ``tokens`` as stored, read in sequences of ``seq``."""

    tokens: np.ndarray
    seq: int

    def __len__(self) -> int:
        return len(self.tokens) // self.seq

    def sequences(self, indices: np.ndarray) -> np.ndarray:
        """Return the sequences with these indices, int64 [len(indices), s]."""
        rows = indices[:, None] * self.seq + np.arange(self.seq)
        return self.tokens[rows].astype(np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle memory-mapped tokens as the name of their file."""
        if isinstance(self.tokens, np.memmap):
            return _mapped, (Path(str(self.tokens.filename)), self.tokens.dtype.str, self.seq)
        return Corpus, (self.tokens, self.seq)


def _mapped(file: Path, dtype: str, seq: int) -> Corpus:
    """Return the corpus of a file of token ids."""
    if not file.stat().st_size:  # It cannot be mapped.
        return Corpus(np.empty(0, dtype=dtype), seq)
    return Corpus(np.memmap(file, dtype=dtype, mode="r"), seq)


class Side(Value):
    """Size of one side of the split."""

    documents: Count
    tokens: Count


class Index(Value):
    """Content of ``index.json``."""

    identity: dict[str, Any]
    dtype: Literal["uint16", "uint32"]
    tokenizer_tokens: Count
    notes: tuple[str, ...] = ()  # Ways in which text is lost
    train: Side
    eval: Side


@dataclass(frozen=True)
class Corpora:
    """Both sides of the split, and the content of ``index.json``."""

    train: Corpus
    eval: Corpus
    index: Index


def open_corpora(folder: Path, options: TrainOptions, *, vocabulary: int, seq: int) -> Corpora:
    """Return the run's data, made by the first call and verified by later ones.

    Raises:
        InputError: bad or changed data, less than one sequence, or a token id outside the model's vocabulary.
    """
    identity = {
        "data": documents.fingerprint(options.data),
        "eval_fraction": options.eval_fraction,
        "tokenizer": options.tokenizer and tokenizer_digest(Path(options.tokenizer)),
        "vocabulary": vocabulary,
    }
    if folder.exists():
        durable.check_folder(folder)
        corpora = opened(folder, seq)
        _refuse_other_data(folder, corpora.index.identity, identity)
        _refuse_foreign_ids(corpora, folder, vocabulary)
        return corpora
    with durable.new_folder(folder) as work:
        _make(work, options, identity, vocabulary)
        _refuse_too_little(opened(work, seq), options)
    return opened(folder, seq)


def opened(folder: Path, seq: int) -> Corpora:
    """Return the data of a folder whose bytes are known to be those that were written."""
    file = folder / INDEX
    index = parse(Index, durable.read_json(file), file=str(file))
    paths, size = [folder / f"{side}.bin" for side in SIDES], np.dtype(index.dtype).itemsize
    if [path.stat().st_size for path in paths] != [index.train.tokens * size, index.eval.tokens * size]:
        raise InputError("not what trainfit wrote", RESTORE, file=str(file))
    train, held_out = (_mapped(path, index.dtype, seq) for path in paths)
    return Corpora(train, held_out, index)


def _refuse_foreign_ids(corpora: Corpora, folder: Path, vocabulary: int) -> None:
    for side, corpus in zip(SIDES, (corpora.train, corpora.eval), strict=True):
        if (largest := int(corpus.tokens.max(initial=0))) >= vocabulary:
            problem = f"holds token id {largest}, the model's vocabulary has {vocabulary}"
            raise InputError(problem, RESTORE, file=str(folder / f"{side}.bin"))


def _refuse_other_data(folder: Path, made_of: dict[str, Any], identity: dict[str, Any]) -> None:
    """Refuse tokens of other data, and tokens that an earlier version truncated or padded.

    The folder's own tokenizer.json is the one that made its tokens.
    """
    if switched_off := load_tokenizer(folder / TOKENIZER)[1]:
        made_with = " and ".join(switched_off)
        problem = f"the run's tokens were made with tokenizer.json's {made_with}, now switched off"
        raise InputError(problem, OTHER_FOLDER, field="tokenizer")
    for field, value in identity.items():
        if made_of.get(field) != value:
            problem = f"the run was started with other data ({field} differs)"
            raise InputError(problem, f"give the data it was started with, or {OTHER_FOLDER}", field=field)


def _refuse_too_little(corpora: Corpora, options: TrainOptions) -> None:
    remedy, name, corpus = "give more text, lower batch.seq", "training", corpora.train
    if len(corpus) and options.eval_fraction:
        remedy, name, corpus = f"{remedy}, raise eval_fraction, or set it to 0", "evaluation", corpora.eval
    if not len(corpus):
        found = f"{len(corpus.tokens):,} tokens of {name} text"
        problem = f"{found} are fewer than one sequence of {corpus.seq:,}"
        raise InputError(problem, remedy, field="data")


def _make(work: Path, options: TrainOptions, identity: dict[str, Any], vocabulary: int) -> None:
    switched_off: list[str] = []
    if options.tokenizer is None:
        held_out, every = documents.for_evaluation, documents.documents(options.data)
        # The tokenizer must not see the held-out documents either.
        seen = (text for text in every if not held_out(text, options.eval_fraction))
        tokenizer = train_tokenizer(seen, vocabulary)
    else:
        tokenizer, switched_off = load_tokenizer(Path(options.tokenizer))
    with writing(work / TOKENIZER):
        tokenizer.save(str(work / TOKENIZER))
    dtype = "uint16" if vocabulary <= 2**16 else "uint32"
    with writing(work), ExitStack() as stack:
        files = [stack.enter_context((work / f"{side}.bin").open("wb")) for side in SIDES]
        counts, notes = _tokenize(options, tokenizer, files, dtype, vocabulary)
    if not any(count["documents"] for count in counts.values()):
        path = identity["data"].get("path")
        raise InputError("the data has no text", "give some", field="data", value=path)
    if switched_off:
        names = " and ".join(switched_off)
        effect = "every document is tokenized whole and as it is"
        notes.insert(0, f"switched off in tokenizer.json: {names}; {effect}")
    index = {"identity": identity, "dtype": dtype, "tokenizer_tokens": tokenizer.get_vocab_size()}
    durable.write_json(work / INDEX, index | {"notes": notes} | counts)


def _tokenize(
    options: TrainOptions, tokenizer: "Tokenizer", files: list[BufferedWriter], dtype: str, vocabulary: int
) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Write the tokens of both sides; return their counts, and a note for each way in which text is lost."""
    end, round_trip = end_token(tokenizer), RoundTrip(tokenizer)
    counts = {side: {"documents": 0, "tokens": 0} for side in SIDES}
    stream = documents.documents(options.data)
    while texts := list(islice(stream, DOCUMENTS_AT_ONCE)):
        for text, encoding in zip(texts, encode(tokenizer, texts, options.tokenizer), strict=True):
            ids = np.array([*encoding.ids, end], dtype=np.int64)
            if ids.max() >= vocabulary:
                problem = f"the tokenizer gives token id {ids.max()}, the model's vocabulary has {vocabulary}"
                remedy = "use the model's own tokenizer, or a config with a larger vocab_size"
                raise InputError(problem, remedy, field="tokenizer", value=options.tokenizer)
            held_out = documents.for_evaluation(text, options.eval_fraction)
            files[held_out].write(ids.astype(dtype).tobytes())
            counts[SIDES[held_out]]["documents"] += 1
            counts[SIDES[held_out]]["tokens"] += len(ids)
            round_trip.add(text, encoding)
    return counts, round_trip.notes(sum(count["tokens"] for count in counts.values()))
