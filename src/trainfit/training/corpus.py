"""Tokenized documents on disk, memory-mapped and read as sequences of equal length.

``data/`` holds ``tokenizer.json``, ``train.bin`` and ``eval.bin`` (token ids, an end token after each
document), ``train.starts.bin`` (the first token of each document), ``index.json``, and, where some tokens are
not learned, ``train.learned.bin`` (one byte a token); the same for ``eval``. It is written once; a resumed
run verifies every byte and reuses it. How documents become sequences: data/packing.py.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from io import BufferedWriter
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trainfit.spec.data import Data, Pack
from trainfit.spec.errors import InputError
from trainfit.spec.files import writing
from trainfit.spec.parsing.parse import parse
from trainfit.spec.value import Count, Value, short_hash
from trainfit.training import documents, durable
from trainfit.training.data import cache
from trainfit.training.data.chat import ChatTemplate, Span, answer_mask, template_text
from trainfit.training.data.packing import Pieces, pieces_of
from trainfit.training.data.records import Completion, Pair, Record, Single, Text
from trainfit.training.options import DataSpec, TrainOptions
from trainfit.training.tokenizer import (
    TOKENIZER,
    RoundTrip,
    RunTokenizer,
    encode,
    load_tokenizer,
    open_tokenizer,
    train_tokenizer,
)

IGNORED = -100  # A label that is not learned
SIDES = ("train", "eval")
INDEX = "index.json"
STARTS, LEARNED = "starts.bin", "learned.bin"
DOCUMENTS_AT_ONCE = 512
CHARS_AT_ONCE = 1 << 23
"""Characters of the documents that are tokenized together, or one document."""
OTHER_FOLDER = "start a new run in another folder"
RESTORE = f"restore it from a copy, or {OTHER_FOLDER}"


@dataclass(frozen=True)
class Corpus:
    """One side of the split: ``tokens`` as stored, read in sequences of ``seq``.

    Attributes:
        starts: first token of each document; None: not known, which only ``pack: true`` allows.
        learned: uint8, 1 for each token that is learned; None: all are.
        pad: id that pads a sequence; its labels are ignored.
        pairs: documents 2 i and 2 i + 1 are the chosen and the rejected answer of example i, which has two
            sequences; else an example is a sequence.
    """

    tokens: np.ndarray
    seq: int
    pack: Pack = True
    starts: np.ndarray | None = None
    learned: np.ndarray | None = None
    pad: int = 0
    pairs: bool = False

    def __len__(self) -> int:
        return len(self.tokens) // self.seq if self.is_plain else len(self.pieces) // self.each

    @property
    def each(self) -> int:
        """Sequences of an example."""
        return 2 if self.pairs else 1

    @property
    def is_plain(self) -> bool:
        """Whether every sequence is a slice of the tokens, and every token is learned."""
        return self.pack is True and self.learned is None

    @cached_property
    def pieces(self) -> Pieces:
        """The pieces of each sequence that has something to learn."""
        if self.pack is True:
            count = len(self.tokens) // self.seq
            edges = np.arange(count + 1)
            every = Pieces(edges[:-1] * self.seq, np.full(count, self.seq), edges)
        else:
            assert self.starts is not None, "a folder of an older version holds no starts"
            every = pieces_of(np.asarray(self.starts, dtype=np.int64), len(self.tokens), self.seq, self.pack)
        labels = _learned_in(every, self.learned)
        has_some = np.add.reduceat(labels, every.first[:-1]) > 0 if len(every) else labels > 0
        if self.pairs:  # Both answers, or neither.
            has_some = has_some.reshape(-1, 2).all(axis=1).repeat(2)
        return every.kept(has_some)

    @cached_property
    def _labels(self) -> np.ndarray:
        per_piece = _learned_in(self.pieces, self.learned)
        return np.add.reduceat(per_piece, self.pieces.first[:-1]) if len(self.pieces) else per_piece

    def num_labels(self, indices: np.ndarray) -> np.ndarray:
        """Return how many tokens of each example are predicted and count in the loss, int64."""
        if self.is_plain:
            return np.full(len(indices), self.seq - 1)
        return self._labels.reshape(-1, self.each).sum(axis=1)[indices]

    @property
    def epoch_labels(self) -> int:
        """Tokens that count in the loss of one pass over the sequences."""
        return len(self) * (self.seq - 1) if self.is_plain else int(self._labels.sum())

    @property
    def padding(self) -> float:
        """Share of padding in the sequences."""
        return (
            0.0
            if not len(self) or self.is_plain
            else 1 - self.pieces.length.sum() / (len(self.pieces) * self.seq)
        )

    def sequences(self, indices: np.ndarray) -> np.ndarray:
        """Return the token ids of the sequences with these indices, int64 [len(indices), s]."""
        return self.batch(indices)["input_ids"]

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return examples as int64 [len(indices) x ``each``, s].

        Returns:
            ``input_ids``; ``labels``, unless they equal them; ``position_ids`` for ``pack: documents``.
        """
        if self.is_plain:
            rows = indices[:, None] * self.seq + np.arange(self.seq)
            return {"input_ids": self.tokens[rows].astype(np.int64)}
        if self.pairs:
            indices = (2 * indices[:, None] + np.arange(2)).flatten()
        shape = (len(indices), self.seq)
        found = {"input_ids": np.full(shape, self.pad, np.int64), "labels": np.full(shape, IGNORED, np.int64)}
        if self.pack == "documents":
            found["position_ids"] = np.zeros(shape, np.int64)
        for row, index in enumerate(indices.tolist()):
            at = 0
            for piece in range(self.pieces.first[index], self.pieces.first[index + 1]):
                length = int(self.pieces.length[piece])
                self._copy(found, row, at, int(self.pieces.start[piece]), length)
                at += length
            if "position_ids" in found:  # Padding is a document of its own.
                found["position_ids"][row, at:] = np.arange(self.seq - at)
        return found

    def _copy(self, found: dict[str, np.ndarray], row: int, at: int, start: int, length: int) -> None:
        """Copy a piece into a row; its first token is not predicted, as nothing precedes it."""
        to, tokens = slice(at, at + length), self.tokens[start : start + length]
        found["input_ids"][row, to] = tokens
        labels = tokens.astype(np.int64)
        if self.learned is not None:
            labels[self.learned[start : start + length] == 0] = IGNORED
        labels[0] = IGNORED
        found["labels"][row, to] = labels
        if "position_ids" in found:
            found["position_ids"][row, to] = np.arange(length)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle memory-mapped arrays as the names of their files."""
        arrays = (self.tokens, self.starts, self.learned)
        named = [
            (Path(str(one.filename)), one.dtype.str) if isinstance(one, np.memmap) else one for one in arrays
        ]
        return _unpickled, (*named, self.seq, self.pack, self.pad, self.pairs)


def _learned_in(pieces: Pieces, learned: np.ndarray | None) -> np.ndarray:
    """Return how many tokens of each piece are learned; the first, which nothing precedes, is not."""
    if learned is None:
        return np.maximum(pieces.length - 1, 0)
    found = np.zeros(len(pieces.start), dtype=np.int64)
    order = np.argsort(pieces.start, kind="stable")
    for some in np.array_split(order, max(1, len(order) // 4096)):  # A part of the file in memory at a time.
        if not len(some):
            continue
        low = int(pieces.start[some[0]])
        high = int((pieces.start[some] + pieces.length[some]).max())
        total = np.concatenate(([0], np.cumsum(learned[low:high], dtype=np.int64)))
        begin, end = pieces.start[some] - low, pieces.start[some] - low + pieces.length[some]
        found[some] = total[end] - total[np.minimum(begin + 1, end)]
    return found


def _unpickled(tokens: Any, starts: Any, learned: Any, seq: int, pack: Pack, pad: int, pairs: bool) -> Corpus:
    arrays = (_mapped(*one) if isinstance(one, tuple) else one for one in (tokens, starts, learned))
    whole, firsts, mask = arrays
    return Corpus(whole, seq, pack, firsts, mask, pad, pairs)


def _mapped(file: Path, dtype: str) -> np.ndarray:
    """Return a file's numbers."""
    if not file.stat().st_size:  # It cannot be mapped.
        return np.empty(0, dtype=dtype)
    return np.memmap(file, dtype=dtype, mode="r")


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
    end: Count | None = None  # Id of the token after each document; None: an older version wrote it
    stops: tuple[Count, ...] = ()  # Ids of more tokens that end a completion, as the model's folder names
    train: Side
    eval: Side


@dataclass(frozen=True)
class Corpora:
    """Both sides of the split, and the content of ``index.json``."""

    train: Corpus
    eval: Corpus
    index: Index


PLAIN = Data()


def open_corpora(
    folder: Path, options: TrainOptions, *, vocabulary: int, seq: int, data: Data = PLAIN, pairs: bool = False
) -> Corpora:
    """Return the run's data, made by the first call and verified by later ones.

    Args:
        data: the recipe's section, of which ``pack`` and ``answers_only`` are read; the rest is in
            ``options``.
        pairs: examples are pairs of answers, one answer a sequence.

    Raises:
        InputError: bad or changed data, less than one sequence, or a token id outside the model's vocabulary.
    """
    pack = False if pairs else data.pack
    identity = identity_of(options, data, vocabulary, pairs=pairs)
    if folder.exists():
        durable.check_folder(folder)
        corpora = opened(folder, seq, pack, pairs=pairs)
        _refuse_other_data(folder, corpora.index.identity, identity)
        _refuse_foreign_ids(corpora, folder, vocabulary)
        return corpora
    with durable.new_folder(folder) as work:
        make(work, options, data, vocabulary, pairs=pairs)
        _refuse_too_little(opened(work, seq, pack, pairs=pairs), options)
    return opened(folder, seq, pack, pairs=pairs)


def identity_of(options: TrainOptions, data: Data, vocabulary: int, *, pairs: bool = False) -> dict[str, Any]:
    """Return the facts that decide the tokens, without unset fields that older versions did not have."""
    identity: dict[str, Any] = {
        "data": documents.fingerprint(options.data),
        "eval_fraction": options.eval_fraction,
        "tokenizer": options.tokenizer and open_tokenizer(options.tokenizer, options.chat_template).digest,
        "vocabulary": vocabulary,
    }
    if options.eval_data is not None:
        identity["eval_data"] = documents.fingerprint(options.eval_data)
    if not data.answers_only:
        identity["answers_only"] = False
    if pairs:
        identity["pairs"] = True
    if options.tokenizer is None and options.chat_template is not None:
        identity["chat_template"] = short_hash(template_text(options.chat_template))
    return identity


def opened(folder: Path, seq: int, pack: Pack = True, *, pairs: bool = False) -> Corpora:
    """Return the data of a folder whose bytes are known to be those that were written."""
    file = folder / INDEX
    index = parse(Index, durable.read_json(file), file=str(file))
    paths, size = [folder / f"{side}.bin" for side in SIDES], np.dtype(index.dtype).itemsize
    if [path.stat().st_size for path in paths] != [index.train.tokens * size, index.eval.tokens * size]:
        raise InputError("not what trainfit wrote", RESTORE, file=str(file))
    sides: list[Corpus] = []
    for side, path in zip(SIDES, paths, strict=True):
        more = {name: folder / f"{side}.{name}" for name in (STARTS, LEARNED)}
        starts, learned = (
            _mapped(one, dtype) if one.exists() else None
            for one, dtype in zip(more.values(), ("int64", "uint8"), strict=True)
        )
        if starts is None and pack is not True:
            problem = "an older version wrote it, without the documents' ends, which data.pack needs"
            raise InputError(problem, OTHER_FOLDER, file=str(folder))
        sides.append(Corpus(_mapped(path, index.dtype), seq, pack, starts, learned, index.end or 0, pairs))
    return Corpora(sides[0], sides[1], index)


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
    for field in dict.fromkeys([*identity, *made_of]):
        if made_of.get(field) != identity.get(field):
            problem = f"the run was started with other data ({field} differs)"
            raise InputError(problem, f"give the data it was started with, or {OTHER_FOLDER}", field=field)


def _refuse_too_little(corpora: Corpora, options: TrainOptions) -> None:
    remedy, name, corpus = "give more text, lower batch.seq", "training", corpora.train
    if len(corpus) and options.evaluates:
        raising = "give more of eval_data" if options.eval_data else "raise eval_fraction"
        remedy, name, corpus = f"{remedy}, {raising}, or set it to 0", "evaluation", corpora.eval
    if not len(corpus):
        found = f"{len(corpus.tokens):,} tokens of {name} text"
        problem = f"{found} are fewer than one sequence of {corpus.seq:,}"
        if len(corpus.tokens) >= corpus.seq or corpus.pack is not True:
            problem = f"{found} have nothing to learn in sequences of {corpus.seq:,}: prompts fill them"
            remedy = "raise batch.seq, or set data.answers_only: false"
        raise InputError(problem, remedy, field="data")


def make(work: Path, options: TrainOptions, data: Data, vocabulary: int, *, pairs: bool = False) -> None:
    """Write the tokens of both sides into ``work``, or link them from the cache."""
    identity = identity_of(options, data, vocabulary, pairs=pairs)
    key = cache.key(identity, options)
    if key is not None and cache.link(key, work):
        return
    _write(work, options, data, vocabulary, identity)
    if key is not None:
        cache.keep(key, work)


def _write(work: Path, options: TrainOptions, data: Data, vocabulary: int, identity: dict[str, Any]) -> None:
    if options.tokenizer is None:
        share = options.held_out_share
        every = documents.records(options.data, pairs="pairs" in identity)
        # The tokenizer must not see the held-out documents either.
        seen = (one.plain for one in every if not documents.for_evaluation(one.key, share))
        run_tokenizer = trained(seen, vocabulary, options.chat_template)
    else:
        run_tokenizer = open_tokenizer(options.tokenizer, options.chat_template)
    with writing(work / TOKENIZER):
        run_tokenizer.save(work)
    dtype = "uint16" if vocabulary <= 2**16 else "uint32"
    with writing(work), ExitStack() as stack:
        sides = [_SideWriter(stack, work, side, dtype) for side in SIDES]
        writer = _Tokens(run_tokenizer, data, vocabulary, options.tokenizer)
        for records, held_out in _split(options, pairs="pairs" in identity):
            for ids, learned in writer.tokens(records):
                sides[held_out].add(ids, learned)
    for side in sides:
        side.finish()
    if not any(side.documents for side in sides):
        path = getattr(options.data, "path", None)
        raise InputError("the data has no text", "give some", field="data", value=path and str(path))
    notes = writer.round_trip.notes(sum(side.tokens for side in sides))
    if run_tokenizer.switched_off:
        names = " and ".join(run_tokenizer.switched_off)
        effect = "every document is tokenized whole and as it is"
        notes.insert(0, f"switched off in tokenizer.json: {names}; {effect}")
    index = {
        "identity": identity, "dtype": dtype,
        "tokenizer_tokens": run_tokenizer.tokenizer.get_vocab_size(), "end": writer.end, "notes": notes,
    }  # fmt: skip
    counts = {side.name: {"documents": side.documents, "tokens": side.tokens} for side in sides}
    durable.write_json(work / INDEX, index | counts)


def trained(texts: Any, vocabulary: int, chat_template: str | None) -> RunTokenizer:
    """Return a byte-level BPE trained on ``texts``, with a chat template if one is named."""
    text = template_text(chat_template)
    template = None if text is None else ChatTemplate(text, {})
    return RunTokenizer(train_tokenizer(texts, vocabulary), [], "", template=template)


def _split(options: TrainOptions, *, pairs: bool) -> Any:
    """Yield parts of the records, in order, each with whether it is held out."""
    share = options.held_out_share
    sources: list[tuple[DataSpec, bool | None]] = [(options.data, None)]
    if options.eval_data is not None:
        sources.append((options.eval_data, True))
    for source, held_out in sources:
        parts: tuple[list[Record], list[Record]] = ([], [])
        sizes = [0, 0]
        for record in documents.records(source, pairs=pairs):
            side = documents.for_evaluation(record.key, share) if held_out is None else held_out
            parts[side].append(record)
            sizes[side] += len(record.plain)
            if len(parts[side]) == DOCUMENTS_AT_ONCE or sizes[side] >= CHARS_AT_ONCE:
                yield list(parts[side]), side
                parts[side].clear()
                sizes[side] = 0
        for side in (False, True):
            if parts[side]:
                yield parts[side], side


class _Tokens:
    """Tokenizes records, and counts text that is lost."""

    def __init__(self, run_tokenizer: RunTokenizer, data: Data, vocabulary: int, name: str | None):
        self._run, self._data, self._vocabulary, self._name = run_tokenizer, data, vocabulary, name
        self.end, self.round_trip = run_tokenizer.end_token(), RoundTrip(run_tokenizer.tokenizer)

    def tokens(self, records: list[Record]) -> Any:
        """Yield the token ids of each record, and which are learned (bool); of each answer of a pair."""
        single = [one for record in records for one in _answers_of(record)]
        texts, spans = zip(*(self._rendered(record) for record in single), strict=True)
        encodings = encode(self._run.tokenizer, list(texts), self._name)
        for record, text, its_spans, encoding in zip(single, texts, spans, encodings, strict=True):
            learned = answer_mask(text, encoding.offsets, its_spans)
            ids = encoding.ids
            if isinstance(record, Text | Completion):
                ids, learned = [*ids, self.end], np.append(learned, True)
            if its_spans is not None and not learned.any():
                problem = f"{record.place} has an answer without a token"
                raise InputError(problem, "remove the row", field="data")
            ids = np.array(ids, dtype=np.int64)
            if ids.max(initial=0) >= self._vocabulary:
                problem = (
                    f"the tokenizer gives token id {ids.max()}, the model's vocabulary has {self._vocabulary}"
                )
                remedy = "use the model's own tokenizer, or a config with a larger vocab_size"
                raise InputError(problem, remedy, field="tokenizer", value=self._name)
            self.round_trip.add(text, encoding)
            if len(ids):
                yield ids, learned

    def _rendered(self, record: Single) -> tuple[str, list[Span] | None]:
        """Return the record's text and the spans of its answers; None: everything is learned."""
        if isinstance(record, Text):
            return record.text, None
        if isinstance(record, Completion):
            text = record.prompt + record.completion
            return text, [(len(record.prompt), len(text))] if self._data.answers_only else None
        if self._run.template is None:
            where = self._name or "the tokenizer that is trained on the data"
            problem = f"{where} has no chat template, which conversations need"
            remedy = "name one by data.chat_template (a Jinja file, or chatml), or a tokenizer that has one"
            raise InputError(problem, remedy, field="data.chat_template")
        return self._run.template.render(record, answers_only=self._data.answers_only)


def _answers_of(record: Record) -> tuple[Single, ...]:
    return (record.chosen, record.rejected) if isinstance(record, Pair) else (record,)


class _SideWriter:
    """Writes the files of one side of the split."""

    def __init__(self, stack: ExitStack, work: Path, name: str, dtype: str):
        self.name, self.documents, self.tokens = name, 0, 0
        self._dtype, self._all_learned = dtype, True
        self._learned_file = work / f"{name}.{LEARNED}"
        self._ids, self._starts, self._learned = (
            stack.enter_context(path.open("wb"))
            for path in (work / f"{name}.bin", work / f"{name}.{STARTS}", self._learned_file)
        )
        self._files: tuple[BufferedWriter, ...] = (self._ids, self._starts, self._learned)

    def add(self, ids: np.ndarray, learned: np.ndarray) -> None:
        """Write a document's tokens, and which of them are learned."""
        self._ids.write(ids.astype(self._dtype).tobytes())
        self._starts.write(np.int64(self.tokens).tobytes())
        self._learned.write(learned.astype(np.uint8).tobytes())
        self._all_learned &= bool(learned.all())
        self.documents += 1
        self.tokens += len(ids)

    def finish(self) -> None:
        """Remove the closed file of learned tokens where all are."""
        if self._all_learned:
            self._learned_file.unlink()
