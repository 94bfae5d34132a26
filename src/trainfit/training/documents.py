"""Stream the records of a data source, and split them into training and evaluation. Free of torch."""

import hashlib
import io
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from trainfit.spec import files
from trainfit.spec.errors import InputError
from trainfit.training.data.records import Layout, PairLayout, Record, Text, layout_of
from trainfit.training.data.rows import Placed, rows_of_file, rows_of_hub
from trainfit.training.options import ROW_SUFFIXES, TEXT_SUFFIXES, DataSpec, HubData, SyntheticData, TextData
from trainfit.training.synthetic import synthetic_text

END_OF_TEXT = "<|endoftext|>"
READ_CHARS = 1 << 20
DOCUMENT_CHARS = 2_000  # A file without separators is cut at the first blank line after this many characters
MAX_DOCUMENT_CHARS = 1 << 20  # Longer documents are cut, so that a file without boundaries is not read whole
READERS = {"jsonl": ".jsonl", "parquet": ".parquet", "text": ".txt"}
"""Value of ``data.format`` that names a type of file -> the suffix of that type."""


def documents(data: DataSpec) -> Iterator[str]:
    """Yield the text of every non-empty record, in an order that depends on ``data`` alone.

    Raises:
        InputError: no text, not UTF-8, or a dataset that cannot be read.
    """
    return (record.plain for record in records(data))


def records(data: DataSpec, *, pairs: bool = False) -> Iterator[Record]:
    """Yield every non-empty record, in an order that depends on ``data`` alone; raises as ``documents``.

    Args:
        pairs: rows hold two answers to a prompt each.
    """
    if pairs:
        return _pairs(data)
    if isinstance(data, SyntheticData):
        return (Text(synthetic_text(data.seed, index).text) for index in range(data.num_documents))
    if isinstance(data, HubData):
        return _of_rows(rows_of_hub(data), "", data)
    return islice(_from_path(data), data.max_documents)


def _pairs(data: DataSpec) -> Iterator[Record]:
    """Yield the pairs of rows; of other sources there are none."""
    if isinstance(data, HubData):
        return _of_rows(rows_of_hub(data), "", data, PairLayout())
    if isinstance(data, SyntheticData):
        problem, remedy = "has no pairs of answers", "name a file of prompt, chosen and rejected (--data)"
        raise InputError(problem, remedy, field="data.train", value=data.kind)
    return islice(_pairs_from(data), data.max_documents)


def _pairs_from(data: TextData) -> Iterator[Record]:
    for path in text_files(Path(data.path)):
        if path.suffix.lower() not in ROW_SUFFIXES:
            problem, remedy = "text has no pairs of answers", "name a file of JSON rows or of Parquet"
            raise InputError(problem, remedy, file=str(path))
        yield from _of_rows(rows_of_file(path), str(path), data, PairLayout())


def require_first(*sources: DataSpec | None, pairs: bool = False) -> None:
    """Read the first record of each source that is a file or a folder.

    Raises:
        InputError: it cannot be read. What is wrong further on is met when the data is tokenized.
    """
    for source in sources:
        if isinstance(source, TextData):
            next(records(source, pairs=pairs), None)


def for_evaluation(document: str, fraction: float) -> bool:
    """Return whether a document is held out, by a hash of its text: equal texts are on one side."""
    digest = hashlib.blake2b(document.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def fingerprint(data: DataSpec) -> dict[str, Any]:
    """Identify the data without reading it: files by their names and sizes."""
    content = data.model_dump(mode="json")
    # Fields that older versions did not have.
    for name in ("format",) if isinstance(data, HubData) else ("format", "column", "max_documents"):
        if content.get(name, data) is None:
            del content[name]
    if isinstance(data, HubData):
        content["column"] = data.column or "text"
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


def _from_path(data: TextData) -> Iterator[Record]:
    for path in text_files(Path(data.path)):
        suffix = READERS.get(data.format or "", path.suffix.lower())
        if suffix == ".parquet" or path.suffix.lower() == ".parquet":
            _refuse_another_reader(path, suffix)
        if suffix in ROW_SUFFIXES or data.format == "chat":
            yield from _of_rows(rows_of_file(path), str(path), data)
            continue
        try:
            with io.TextIOWrapper(files.open_regular(path), encoding="utf-8-sig") as file:
                pieces = _pieces(file, data.separator)
                yield from (Text(piece.strip()) for piece in pieces if piece.strip())
        except UnicodeDecodeError as error:
            raise InputError(f"not UTF-8 text ({error.reason})", "save it as UTF-8", file=str(path)) from None


def _refuse_another_reader(path: Path, suffix: str) -> None:
    if path.suffix.lower() != suffix:
        problem = f"{path.name} is not read as {suffix.lstrip('.')}"
        raise InputError(problem, "leave data.format out, or name other files", field="data.format")


def _of_rows(
    rows: Iterator[Placed], file: str, data: TextData | HubData, known: PairLayout | None = None
) -> Iterator[Record]:
    """Yield the records of rows, which all have the columns of the first, or the known ones."""
    layout: Layout | PairLayout | None = known
    for place, row in rows:
        if layout is None:
            layout = layout_of(row, place, file, chat=data.format == "chat", column=data.column)
        record = layout.record(row, place, file)
        if isinstance(record, Text) and len(record.text) > MAX_DOCUMENT_CHARS:
            yield from (Text(piece, place) for piece in _at_most(record.text))
        elif record is not None:
            yield record


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
