"""The tokenizer of a run: a byte-level BPE trained on the run's documents, or a given one.

A given one is a ``tokenizer.json``, a folder or a name on the Hub; code of a repository is never run.

A byte-level tokenizer encodes every text without loss; ``RoundTrip`` counts what a given file loses.
"""

import contextlib
import hashlib
import json
import os
import re
import sys
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainfit.spec import files
from trainfit.spec.errors import InputError
from trainfit.training.data.chat import ChatTemplate, template_text
from trainfit.training.documents import END_OF_TEXT

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

BYTES = 256
MAX_TOKENIZER_BYTES = 256 * 10**6  # Published files reach about 35 MB
SAMPLE_CHARS = 50_000_000
"""Characters that a tokenizer is trained on at most: merges of common words do not change after that."""
LIBRARY_ERRORS = (Exception, ValueError, TypeError, OverflowError, UnicodeDecodeError)
"""Classes, without subclasses, of the tokenizers library's errors."""
TOKENIZER, CHAT_TEMPLATE = "tokenizer.json", "chat_template.jinja"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
END_NAMES = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "<|eot_id|>", "[SEP]")
"""Names of the token that ends a document, in the order in which they are tried."""


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> "Tokenizer":
    """Train a byte-level BPE of at most ``vocabulary`` tokens (at least 257); fewer if no pairs repeat."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocabulary <= BYTES:
        problem = f"a byte-level tokenizer needs {BYTES + 1} tokens"
        remedy = f"use a model whose vocab_size is at least {BYTES + 1}, or give a tokenizer.json"
        raise InputError(problem, remedy, field="model.config.vocab_size", value=vocabulary)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, min_frequency=2, special_tokens=[END_OF_TEXT], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(_sample(texts), trainer=trainer)
    return tokenizer


def _sample(texts: Iterable[str]) -> Iterator[str]:
    left = SAMPLE_CHARS
    for text in texts:
        yield text
        left -= len(text)
        if left <= 0:
            return


def tokenizer_digest(path: Path) -> str:
    """Return the SHA-256 of a ``tokenizer.json``."""
    return hashlib.sha256(_read(path)).hexdigest()


@dataclass(frozen=True)
class RunTokenizer:
    """A tokenizer, the names of the options switched off in it, and its chat template if it has one."""

    tokenizer: "Tokenizer"
    switched_off: list[str]
    digest: str  # Digest of the files that decide the tokens
    end: int | None = None  # Written after each document; None: of END_NAMES
    template: ChatTemplate | None = None
    pretrained: Any = None  # transformers' object, of a folder or a name

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json``, transformers' files of a folder or a name, and the chat template."""
        if self.pretrained is not None:
            self.pretrained.save_pretrained(str(folder))
        elif self.template is not None:
            files.write_text(folder / CHAT_TEMPLATE, self.template.text)
        self.tokenizer.save(str(folder / TOKENIZER))

    def end_token(self) -> int:
        """Return the id of the token written after each document."""
        return end_token(self.tokenizer) if self.end is None else self.end


def open_tokenizer(given: str, chat_template: str | None) -> RunTokenizer:
    """Load a tokenizer from a ``tokenizer.json``, a folder, or the Hub's cache or the Hub.

    Args:
        chat_template: ``data.chat_template``.

    Raises:
        InputError: no such tokenizer, one that only code of its own can load, or a bad template.
    """
    text = template_text(chat_template)
    path = Path(given)
    if "\0" not in given and path.is_dir():
        return _pretrained(given, text, is_folder=True)
    if not given.endswith(".json") and HUB_NAME.fullmatch(given) and not path.exists():
        return _pretrained(given, text, is_folder=False)
    content = hashlib.sha256(_read(path))
    tokenizer, switched_off = load_tokenizer(path)
    if text is not None:
        content.update(text.encode("utf-8", "surrogatepass"))
    template = None if text is None else ChatTemplate(text, {}, _specials(tokenizer))
    return RunTokenizer(tokenizer, switched_off, content.hexdigest(), template=template)


def _pretrained(name: str, text: str | None, *, is_folder: bool) -> RunTokenizer:
    """Load a tokenizer with transformers: from a folder, from the Hub's local cache, or from the Hub."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers import AutoTokenizer
    from transformers.utils import logging

    def load(**where: Any) -> Any:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False, **where)

    remedy = "name a folder with a tokenizer.json, or a tokenizer of the Hub that needs no code of its own"
    before, hub_before = logging.get_verbosity(), hub_logging.get_verbosity()
    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()  # It reports each try to reach the Hub.
    try:
        try:
            found = load(local_files_only=True)
        except Exception:
            if is_folder:
                raise
            found = load()
    except Exception as error:  # Its own, those of huggingface_hub, httpx, tokenizers and json.
        reason = " ".join((str(error).strip().splitlines() or [type(error).__name__])[0].split())[:200]
        raise InputError(f"no tokenizer ({reason})", remedy, field="tokenizer", value=name) from None
    finally:
        logging.set_verbosity(before)
        hub_logging.set_verbosity(hub_before)
    tokenizer = getattr(found, "backend_tokenizer", None)
    if tokenizer is None:
        problem = "a tokenizer written in Python, which gives no character offsets of its tokens"
        raise InputError(problem, "name one with a tokenizer.json", field="tokenizer", value=name)
    switched_off = _switch_off(tokenizer)
    encode(tokenizer, ["A text, 1 and ü.", ""], name)
    if text is None and getattr(found, "chat_template", None):
        with _as_input_error(name):
            text = found.get_chat_template()
    elif text is not None:
        found.chat_template = text
    special = {key: value for key, value in found.special_tokens_map.items() if isinstance(value, str)}
    template = None if text is None else ChatTemplate(text, special, _specials(tokenizer))
    digest = hashlib.sha256(
        f"{tokenizer.to_str()}{text}{sorted(special.items())}".encode("utf-8", "surrogatepass")
    )
    return RunTokenizer(tokenizer, switched_off, digest.hexdigest(), found.eos_token_id, template, found)


@contextlib.contextmanager
def _as_input_error(name: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:  # Several named templates, and none is the default.
        reason = str(error).splitlines()[0][:200]
        raise InputError(reason, "name one by data.chat_template", field="tokenizer", value=name) from None


def _specials(tokenizer: "Tokenizer") -> tuple[str, ...]:
    return tuple(token.content for token in tokenizer.get_added_tokens_decoder().values())


def load_tokenizer(path: Path) -> "tuple[Tokenizer, list[str]]":
    """Load a ``tokenizer.json`` without truncation, padding and BPE dropout; return the names of those it
    had.

    On training documents truncation drops text, padding adds tokens that count as text, and dropout splits
    words at random, differently at each call.

    Raises:
        InputError: no such file, not a regular file, or not a tokenizer.
    """
    from tokenizers import Tokenizer

    content = _read(path)
    with _library(str(path), "not a tokenizer.json", "save one with tokenizers"):
        tokenizer = Tokenizer.from_str(content.decode("utf-8-sig"))
        switched_off = _switch_off(tokenizer)
        for token in END_NAMES:
            tokenizer.token_to_id(token)
    encode(tokenizer, ["A text, 1 and ü.", ""], str(path))
    return tokenizer, switched_off


def _read(path: Path) -> bytes:
    try:
        return files.read_bytes(path, MAX_TOKENIZER_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        problem, remedy = "no such file", "name a tokenizer.json"
        raise InputError(problem, remedy, field="tokenizer", value=str(path)) from None


def encode(tokenizer: "Tokenizer", texts: list[str], file: str | None) -> "list[Encoding]":
    """Encode each text without the special tokens of the file's template."""
    remedy = "add an unknown token to its model, or use a byte-level tokenizer"
    with _library(file, "the tokenizer cannot encode the text", remedy):
        return tokenizer.encode_batch(texts, add_special_tokens=False)


def _switch_off(tokenizer: "Tokenizer") -> list[str]:
    found: list[str] = []
    if tokenizer.truncation is not None:
        found.append(f"truncation (max_length {tokenizer.truncation['max_length']})")
    if tokenizer.padding is not None:
        found.append("padding")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None):
        found.append(f"dropout ({tokenizer.model.dropout:g})")
        tokenizer.model.dropout = None
    return found


def end_token(tokenizer: "Tokenizer") -> int:
    """Return the id of the token written after each document; InputError if END_NAMES has none."""
    for name in END_NAMES:
        if (found := tokenizer.token_to_id(name)) is not None:
            return found
    remedy = f"add one named {' or '.join(END_NAMES[:2])}"
    raise InputError("the tokenizer has no end-of-document token", remedy, field="tokenizer")


class RoundTrip:
    """Count unknown tokens, and characters of the text that decoding its tokens does not give back.

    Case and compatible forms of a character (NFKD) count as the same character.
    """

    def __init__(self, tokenizer: "Tokenizer"):
        content = json.loads(tokenizer.to_str())
        self._unknown = _unknown_token(tokenizer, content["model"])
        self._decode = _decoder(tokenizer, content)
        self._num_unknown, self._num_characters = 0, 0
        self._lost: Counter[str] = Counter()

    def add(self, text: str, encoding: "Encoding") -> None:
        """Compare a text with its encoding."""
        tokens, known = encoding.tokens, text
        if self._unknown is not None and self._unknown in encoding.ids:
            rows = list(zip(encoding.ids, encoding.tokens, encoding.offsets, strict=True))
            tokens = [token for number, token, _ in rows if number != self._unknown]
            self._num_unknown += len(rows) - len(tokens)
            for start, end in reversed([span for number, _, span in rows if number == self._unknown]):
                known = known[:start] + known[end:]
        self._num_characters += len(text)
        decoded = self._decode(tokens)
        if decoded != known:
            self._lost += Counter(_folded(known)) - Counter(_folded(decoded))

    def notes(self, num_tokens: int) -> list[str]:
        """Return one line for each kind of loss."""
        notes: list[str] = []
        if self._num_unknown:
            notes.append(f"{self._num_unknown:,} of {num_tokens:,} tokens are the tokenizer's unknown token")
        if self._lost:
            some = ", ".join(f"{character!r} ({count:,})" for character, count in self._lost.most_common(3))
            lost = f"{self._lost.total():,} of the text's {self._num_characters:,} characters"
            notes.append(f"the tokenizer leaves out {lost}, most often {some}")
        return notes


def _unknown_token(tokenizer: "Tokenizer", model: dict[str, Any]) -> int | None:
    """Return the id of the unknown token, if there is one. Unigram's is in the file alone."""
    name = getattr(tokenizer.model, "unk_token", None)
    return model.get("unk_id") if name is None else tokenizer.token_to_id(name)


def _decoder(tokenizer: "Tokenizer", content: dict[str, Any]) -> Callable[[list[str]], str]:
    """Return the tokenizer's decoder; if it has none, one that inverts its pre-tokenizer."""
    from tokenizers import decoders

    if tokenizer.decoder is not None:
        return tokenizer.decoder.decode
    before = json.dumps(content["pre_tokenizer"])
    for kind in ("ByteLevel", "Metaspace"):
        if f'"{kind}"' in before:
            return getattr(decoders, kind)().decode
    return " ".join if content["model"]["type"] in ("WordLevel", "WordPiece") else "".join


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKD", text).casefold().replace("▁", " ")


@contextlib.contextmanager
def _library(file: str | None, problem: str, remedy: str) -> Iterator[None]:
    """Convert exceptions of the tokenizers library into an InputError.

    Its Rust code panics on some files: that raises a BaseException and prints a report to standard error,
    which is suppressed.
    """
    with _standard_error_held() as release:
        try:
            yield
        except BaseException as error:
            panicked = type(error).__name__ == "PanicException"
            if not panicked and type(error) not in LIBRARY_ERRORS:
                raise
            lines = str(error).splitlines() or [type(error).__name__]
            raise InputError(f"{problem}: {lines[0][:200]}", remedy, file=file or "") from None
        release()


@contextlib.contextmanager
def _standard_error_held() -> Iterator[Callable[[], None]]:
    """Buffer standard error's descriptor; on exit write the content if the yielded function was called."""
    sys.stderr.flush()
    kept = os.dup(2)
    wanted: list[bool] = []
    with tempfile.TemporaryFile() as buffer:
        os.dup2(buffer.fileno(), 2)
        try:
            yield lambda: wanted.append(True)
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            if wanted:
                buffer.seek(0)
                with contextlib.suppress(OSError):  # Standard error may be closed.
                    os.write(2, buffer.read())
