"""Batches of text from a disk, by PyTorch's DataLoader: tokenised in the collator or before, lazy or not.

The documents are random words whose frequencies follow Zipf's law, repeated in random order, with a
byte-level BPE trained on them. A *lazy* data set reads a document when it is asked for one; one *in memory*
is read whole before the workers fork, which then share it. Before a sample that reads from a cold disk, the
files' pages are removed from the kernel's page cache. A cache of the disk itself, or of a virtual machine's
host, stays as it is.

Shapes: b sequences, s tokens.
"""

import ctypes
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from trainfit.spec.errors import InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCABULARY = 4096
WORDS, LETTERS = 20_000, "etaoinshrdlucmfwypvbgk"
MOST_RESIDENT = 0.05  # Share of a file's pages in memory from which it does not count as evicted
FORK_WARNING = "TOKENIZERS_PARALLELISM"  # The tokenizers library warns of a fork after its threads were used
COLD_DISK, PAGE_CACHE, MEMORY = "cold disk", "page cache", "memory"


@dataclass(frozen=True)
class Sizes:
    """Size of the files and of a batch; ``distinct``: documents that are repeated to make ``documents``."""

    documents: int
    distinct: int
    batch: int
    seq: int


class TextFiles:
    """A file of documents and a file of their tokens, written when first used and deleted by ``close``."""

    def __init__(self, sizes: Sizes):
        self.sizes = sizes
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @cached_property
    def folder(self) -> Path:
        self._folder = tempfile.TemporaryDirectory(prefix="trainfit-text-")
        return Path(self._folder.name)

    def close(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    @cached_property
    def tokenizer(self) -> "Tokenizer":
        """The tokenizer of these documents."""
        before = os.environ.get(FORK_WARNING)
        os.environ[FORK_WARNING] = "false"
        try:
            return _trained(self._distinct)
        finally:
            os.environ.pop(FORK_WARNING)
            if before is not None:
                os.environ[FORK_WARNING] = before

    @cached_property
    def _distinct(self) -> list[str]:
        generator = np.random.default_rng(0)
        lengths = generator.integers(2, 10, size=WORDS)
        words = ["".join(generator.choice(list(LETTERS), size=length)) for length in lengths]
        share = 1 / np.arange(1, WORDS + 1)
        share /= share.sum()
        found = []
        for _ in range(self.sizes.distinct):
            chosen = generator.choice(WORDS, size=self.sizes.seq, p=share)  # A word has a token or more.
            found.append(" ".join(words[index] for index in chosen))
        return found

    @cached_property
    def starts(self) -> np.ndarray:
        """First byte of each document in ``text``, and the end of the last; int64 [documents + 1]."""
        order = np.random.default_rng(0).integers(self.sizes.distinct, size=self.sizes.documents)
        pieces = [text.encode() for text in self._distinct]
        ids = [tokens_of(self.tokenizer, text, self.sizes.seq) for text in self._distinct]
        with self.text.open("wb") as text, self.tokens.open("wb") as tokens:
            for number in order.tolist():
                text.write(pieces[number])
                tokens.write(ids[number].tobytes())
            for file in (text, tokens):  # Pages that are not on the disk yet cannot be evicted.
                file.flush()
                os.fsync(file.fileno())
        lengths = np.array([len(piece) for piece in pieces], dtype=np.int64)
        return np.concatenate(([0], np.cumsum(lengths[order])))

    @property
    def text(self) -> Path:
        return self.folder / "documents.txt"

    @property
    def tokens(self) -> Path:
        """uint16 [documents, s]."""
        return self.folder / "tokens.bin"


def _trained(texts: Sequence[str]) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer


def tokens_of(tokenizer: "Tokenizer", text: str, seq: int) -> np.ndarray:
    """Return the first ``seq`` token ids of a document, uint16 [s]."""
    ids = tokenizer.encode(text).ids[:seq]
    assert len(ids) == seq, f"a document of {len(ids)} tokens"
    return np.array(ids, dtype=np.uint16)


def evict(path: Path) -> None:
    """Remove a file's pages from the kernel's page cache.

    Raises:
        InputError: the system cannot, or keeps the pages, as a file system in memory does.
    """
    if not hasattr(os, "posix_fadvise"):
        raise InputError("this system has no posix_fadvise, which evicts pages", "measure on Linux")
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def check_evicted(path: Path) -> None:
    """Raise InputError where ``evict`` leaves pages in memory."""
    evict(path)
    resident = resident_share(path)
    if resident > MOST_RESIDENT:
        problem = f"{resident:.0%} of a file's pages stay in memory after their eviction"
        raise InputError(problem, "set TMPDIR to a folder on a disk", field="TMPDIR", value=str(path.parent))


def resident_share(path: Path) -> float:
    """Return the share of a file's pages that the page cache holds (mincore)."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        pages = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
        first = ctypes.c_char.from_buffer(mapped)
        libc = ctypes.CDLL(None, use_errno=True)
        size = ctypes.c_size_t(len(mapped))
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), size, pages)
        del first  # A map that is exported cannot be closed.
        if failed:
            raise OSError(ctypes.get_errno(), "mincore")
        return sum(page & 1 for page in pages) / len(pages)


class Documents(Dataset[Any]):
    """Document i: its text (str), or its tokens (uint16 [s]) where they were made before."""

    def __init__(self, files: TextFiles, *, tokenised: bool, in_memory: bool):
        self._starts, self._seq, self._tokenised = files.starts, files.sizes.seq, tokenised
        self._path = files.tokens if tokenised else files.text
        self._descriptor: int | None = None
        self._whole: list[Any] | None = None
        if in_memory:
            self._whole = [self[index] for index in range(len(self))]

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> Any:
        if self._whole is not None:
            return self._whole[index]
        if self._descriptor is None:  # A worker opens its own.
            self._descriptor = os.open(self._path, os.O_RDONLY)
        if self._tokenised:
            row = os.pread(self._descriptor, 2 * self._seq, 2 * self._seq * index)
            return np.frombuffer(row, dtype=np.uint16)
        begin, end = self._starts[index : index + 2].tolist()
        return os.pread(self._descriptor, end - begin, begin).decode()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_descriptor": None}

    def __del__(self) -> None:
        if self.__dict__.get("_descriptor") is not None:
            os.close(self._descriptor)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class Collator:
    """Makes a batch, int64 [b, s]; tokenises, one document after another, where it gets text."""

    tokenizer: "Tokenizer | None"
    seq: int

    def __call__(self, documents: Sequence[Any]) -> Tensor:
        if self.tokenizer is not None:
            documents = [tokens_of(self.tokenizer, text, self.seq) for text in documents]
        return torch.from_numpy(np.stack(documents).astype(np.int64))


class Endless:
    """Batches of random document numbers without end."""

    def __init__(self, documents: int, batch: int):
        self._documents, self._batch = documents, batch

    def __iter__(self) -> Iterator[list[int]]:
        generator = np.random.default_rng(0)
        while True:
            yield generator.integers(self._documents, size=self._batch).tolist()


def token_batches(
    files: TextFiles, *, tokenised: bool, in_memory: bool, workers: int, prefetch: int, pinned: bool
) -> Iterator[Tensor]:
    """Return endless batches, int64 [b, s], of a running loader."""
    documents = Documents(files, tokenised=tokenised, in_memory=in_memory)
    collator = Collator(None if tokenised else files.tokenizer, files.sizes.seq)
    loader: Any = DataLoader(
        documents,
        batch_sampler=Endless(len(documents), files.sizes.batch),
        collate_fn=collator,
        num_workers=workers,
        prefetch_factor=prefetch if workers else None,
        pin_memory=pinned,
    )
    return iter(loader)


def reads_in_order(path: Path, num_bytes: int) -> Callable[[], int]:
    """Return a function that reads the first ``num_bytes`` of a file, 1 MiB at a time."""
    return lambda: _read(path, [(at, 1 << 20) for at in range(0, num_bytes, 1 << 20)])


def reads_at_random(path: Path, count: int) -> Callable[[], int]:
    """Return a function that reads ``count`` random pages of a file, others at each call."""
    generator, pages = np.random.default_rng(0), path.stat().st_size // mmap.PAGESIZE

    def read() -> int:
        places = generator.integers(pages, size=count) * mmap.PAGESIZE
        return _read(path, [(int(at), mmap.PAGESIZE) for at in places])

    return read


def _read(path: Path, pieces: Sequence[tuple[int, int]]) -> int:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return sum(len(os.pread(descriptor, size, at)) for at, size in pieces)
    finally:
        os.close(descriptor)
