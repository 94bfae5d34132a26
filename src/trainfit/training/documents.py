"""Stream the documents of a data source, and split them into training and evaluation. Free of torch."""

import hashlib
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from trainfit.spec import files
from trainfit.spec.errors import InputError
from trainfit.spec.optional import optional
from trainfit.spec.parsing.plain_data import LONE_SURROGATE
from trainfit.training.options import SYNTHETIC, TEXT_SUFFIXES, DataSpec, HubData, SyntheticData, TextData
from trainfit.training.synthetic import synthetic_text

END_OF_TEXT = "<|endoftext|>"
READ_CHARS = 1 << 20
DOCUMENT_CHARS = 2_000  # A file without separators is cut at the first blank line after this many characters
MAX_LINE_CHARS = 2**28  # Longest line of a .jsonl file, which is read whole
MAX_DOCUMENT_CHARS = 1 << 20  # Longer documents are cut, so that a file without boundaries is not read whole


def documents(data: DataSpec) -> Iterator[str]:
    """Yield every non-empty document, in an order that depends on ``data`` alone.

    Raises:
        InputError: no text, not UTF-8, or a dataset that cannot be read.
    """
    if isinstance(data, SyntheticData):
        return (synthetic_text(data.seed, index).text for index in range(data.num_documents))
    return _from_path(data) if isinstance(data, TextData) else _from_hub(data)


def for_evaluation(document: str, fraction: float) -> bool:
    """Return whether a document is held out, by a hash of its text: equal texts are on one side."""
    digest = hashlib.blake2b(document.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def fingerprint(data: DataSpec) -> dict[str, Any]:
    """Identify the data without reading it: files by their names and sizes."""
    content = data.model_dump(mode="json")
    if isinstance(data, TextData):
        root = Path(data.path)
        del content["path"]  # The run's folder may move with its data.
        base = root if root.is_dir() else root.parent
        sizes = {path.relative_to(base).as_posix(): path.stat().st_size for path in text_files(root)}
        content["files"] = [list(item) for item in sizes.items()]
    return content


def text_files(root: Path) -> list[Path]:
    """Return the file itself, or the text files under a folder, sorted, without hidden ones.

    Raises:
        InputError: no such file or folder, not a regular file, or a folder without text files.
    """
    if not root.is_dir():
        try:
            files.open_regular(root).close()
        except (FileNotFoundError, NotADirectoryError):
            remedy = "name a text file or a folder"
            raise InputError("no such file or folder", remedy, field="data.path", value=str(root)) from None
        return [root]
    named = [path for path in root.rglob("*") if path.suffix.lower() in TEXT_SUFFIXES and path.is_file()]
    found = sorted(path for path in named if "/." not in f"/{path.relative_to(root).as_posix()}")
    if not found:
        remedy = f"put {', '.join(TEXT_SUFFIXES)} there"
        raise InputError("no text files in this folder", remedy, field="data.path", value=str(root))
    return found


def _from_path(data: TextData) -> Iterator[str]:
    for path in text_files(Path(data.path)):
        try:
            with io.TextIOWrapper(files.open_regular(path), encoding="utf-8") as file:
                is_json = path.suffix.lower() == ".jsonl"
                pieces = _json_lines(file, path) if is_json else _pieces(file, data.separator)
                yield from (piece.strip() for piece in pieces if piece.strip())
        except UnicodeDecodeError as error:
            raise InputError(f"not UTF-8 text ({error.reason})", "save it as UTF-8", file=str(path)) from None


def _pieces(file: TextIO, separator: str | None) -> Iterator[str]:
    """Yield the text cut at separators, read a megabyte at a time."""
    text = file.read(READ_CHARS)
    mark = separator or (END_OF_TEXT if END_OF_TEXT in text else None)
    boundary = re.compile(re.escape(mark)) if mark else re.compile(r"\n[ \t]*\n\s*")
    smallest = 0 if mark else DOCUMENT_CHARS
    while text:
        more = file.read(READ_CHARS)
        start = 0
        while found := boundary.search(text, start + smallest):
            # A boundary at the end may continue in the next megabyte.
            if more and found.end() == len(text):
                break
            yield from _at_most(text[start : found.start()])
            start = found.end()
        text = text[start:]
        if not more:
            yield from _at_most(text)
            return
        while len(text) > MAX_DOCUMENT_CHARS:
            yield text[:MAX_DOCUMENT_CHARS]
            text = text[MAX_DOCUMENT_CHARS:]
        text += more


def _at_most(text: str) -> Iterator[str]:
    for start in range(0, len(text), MAX_DOCUMENT_CHARS):
        yield text[start : start + MAX_DOCUMENT_CHARS]


def _json_lines(file: TextIO, path: Path) -> Iterator[str]:
    for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_CHARS + 1), ""), 1):
        if len(line) > MAX_LINE_CHARS:
            problem = f"line {number} is over {MAX_LINE_CHARS:,} characters"
            raise InputError(problem, "write one document a line", file=str(path))
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError, RecursionError):  # ValueError: also over 4,300 digits.
            text = None
        if not isinstance(text, str):
            raise InputError(f"line {number} has no text", 'write {"text": "..."} a line', file=str(path))
        if not text.isascii() and LONE_SURROGATE.search(text):
            problem = f"line {number} is not Unicode text (a lone surrogate)"
            raise InputError(problem, "write the character itself", file=str(path))
        yield text


def _from_hub(data: HubData) -> Iterator[str]:
    datasets: Any = optional("datasets", "datasets", field="data", value=f"hub:{data.name}")
    try:
        rows = datasets.load_dataset(data.name, data.config, split=data.split, streaming=True)
        for number, row in enumerate(rows):
            if number == data.max_documents:
                return
            text = row.get(data.column)
            if not isinstance(text, str):
                problem, remedy = "no text column of this name", f"use one of {', '.join(row)}"
                raise InputError(problem, remedy, field="data.column", value=data.column)
            if text.strip():
                yield text.strip()
    except InputError:
        raise
    except Exception as error:  # Its own errors, and those of requests, httpx and fsspec.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        remedy = f"check its name and the network, or use text files or {SYNTHETIC}"
        problem, value = f"dataset cannot be read: {reason}", f"hub:{data.name}"
        raise InputError(problem, remedy, field="data", value=value) from error
