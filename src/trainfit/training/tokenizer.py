"""The tokenizer of a run: a byte-level BPE trained on the run's documents, or a ``tokenizer.json`` of one's own.

Byte-level: every text has a tokenisation, so no token is unknown. A file of one's own may say otherwise; what it does to
the text is counted by corpus.py.
"""

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from trainfit.spec import files
from trainfit.spec.errors import InputError
from trainfit.training.documents import END_OF_TEXT

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTES = 256
MAX_TOKENIZER_BYTES = 256 * 10**6
"""The largest published ones are some 35 MB."""
SAMPLE_CHARS = 50_000_000
"""Training reads at most so many characters: merges of common words do not change after that."""
END_NAMES = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "<|eot_id|>", "[SEP]")
"""How tokenizers call the token that ends a document, in the order in which it is looked for."""

CANNOT_ENCODE = "the tokenizer cannot encode the text"
ADD_UNKNOWN = "add an unknown token to its model, or use a byte-level tokenizer"


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> "Tokenizer":
    """A byte-level BPE of at most ``vocabulary`` tokens; fewer when the texts have no more pairs that repeat.

    Raises:
        InputError: the vocabulary is too small for the 256 bytes and the end token.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocabulary <= BYTES:
        raise InputError(
            f"a byte-level tokenizer needs {BYTES + 1} tokens",
            f"use a model whose vocab_size is at least {BYTES + 1}, or give a tokenizer.json",
            field="model.config.vocab_size",
            value=vocabulary,
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(texts), trainer=trainer)
    return tokenizer


class LoadedTokenizer(NamedTuple):
    """A tokenizer that encodes every document whole, and the settings of its file that were switched off for it."""

    tokenizer: "Tokenizer"
    switched_off: tuple[str, ...]


def load_tokenizer(path: Path) -> LoadedTokenizer:
    """Load a ``tokenizer.json`` without truncation, padding and BPE dropout.

    Those three serve a model's input, one text at a time. On training documents truncation drops text, padding adds tokens
    that count as text, and dropout splits words at random, differently at each call.

    Raises:
        InputError: not there, or not a tokenizer.
    """
    from tokenizers import Tokenizer

    try:
        text = files.read_text(path, MAX_TOKENIZER_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        problem, remedy = "no such file", "name a tokenizer.json"
        raise InputError(problem, remedy, field="tokenizer", value=str(path)) from None
    with library(str(path)):
        tokenizer = Tokenizer.from_str(text)
        switched_off = _switch_off(tokenizer)
        for token in END_NAMES:
            tokenizer.token_to_id(token)
    with library(str(path), CANNOT_ENCODE, ADD_UNKNOWN):
        tokenizer.encode_batch(["A text, 1 and ü.", ""], add_special_tokens=False)
    return LoadedTokenizer(tokenizer, switched_off)


def _switch_off(tokenizer: "Tokenizer") -> tuple[str, ...]:
    """Switch off what changes a text on its way to tokens; return the names of what was on."""
    found: list[str] = []
    if tokenizer.truncation is not None:
        found.append(f"truncation (max_length {tokenizer.truncation['max_length']})")
        tokenizer.no_truncation()
    if tokenizer.padding is not None:
        found.append("padding")
        tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None):
        found.append(f"dropout ({tokenizer.model.dropout:g})")
        tokenizer.model.dropout = None
    return tuple(found)


def unknown_token(tokenizer: "Tokenizer") -> int | None:
    """Return the id that stands for text the vocabulary lacks; None: the tokenizer has none."""
    model = tokenizer.model
    if hasattr(model, "unk_token"):
        return None if model.unk_token is None else tokenizer.token_to_id(model.unk_token)
    return json.loads(tokenizer.to_str())["model"].get("unk_id")  # Unigram's is in its file only.


def left_out(tokenizer: "Tokenizer", characters: Iterable[str]) -> str:
    """Return those of ``characters``, sorted, that are left out of a text without a token of any kind.

    BPE alone does so, without byte fallback and without an unknown token; other models fail. White space and what the
    normalizer removes are not counted: removing them is what the file is for.
    """
    from tokenizers import models

    if not isinstance(tokenizer.model, models.BPE) or tokenizer.model.unk_token is not None:
        return ""
    normalizer = tokenizer.normalizer
    return "".join(
        character
        for character in sorted(characters)
        if not character.isspace()
        and (normalizer is None or normalizer.normalize_str(character).strip())
        and not tokenizer.encode(character, add_special_tokens=False).ids
    )


@contextlib.contextmanager
def library(
    file: str | None, problem: str = "not a tokenizer.json", remedy: str = "save one with tokenizers"
) -> Iterator[None]:
    """Turn what the tokenizers library raises over a ``tokenizer.json`` into one line.

    Its Rust code panics on some files: that is a BaseException, and its own report goes to the process's standard error,
    which is held back while this is entered.

    Raises:
        InputError: the library failed.
    """
    with _held_back() as release:
        try:
            yield
        except BaseException as error:
            panicked = type(error).__name__ == "PanicException"
            if not panicked and type(error) not in (Exception, ValueError, TypeError, OverflowError):
                raise
            lines = str(error).splitlines() or [type(error).__name__]
            raise InputError(f"{problem}: {lines[0][:200]}", remedy, file=file or "") from None
        release()


@contextlib.contextmanager
def _held_back() -> Iterator[Callable[[], None]]:
    """Keep what is written to standard error's descriptor, and write it there at the end if the given function is called."""
    sys.stderr.flush()
    kept = os.dup(2)
    wanted = False

    def release() -> None:
        nonlocal wanted
        wanted = True

    with tempfile.TemporaryFile() as buffer:
        os.dup2(buffer.fileno(), 2)
        try:
            yield release
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            if wanted:
                buffer.seek(0)
                with contextlib.suppress(OSError):  # Nobody reads standard error any more.
                    os.write(2, buffer.read())


def end_token(tokenizer: "Tokenizer") -> int:
    """Id of the token written after each document.

    Raises:
        InputError: the tokenizer has none of END_NAMES.
    """
    for name in END_NAMES:
        found = tokenizer.token_to_id(name)
        if found is not None:
            return found
    raise InputError(
        "the tokenizer has no end-of-document token",
        f"add one named {' or '.join(END_NAMES[:2])}",
        field="tokenizer",
    )


def _sample(texts: Iterable[str]) -> Iterator[str]:
    left = SAMPLE_CHARS
    for text in texts:
        yield text
        left -= len(text)
        if left <= 0:
            return
