"""Rows of JSON Lines, JSON and Parquet files, and of Hugging Face datasets. Free of torch.

A few rows are in memory at a time.
"""

import io
import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from trainfit.spec import files
from trainfit.spec.errors import InputError
from trainfit.spec.optional import optional
from trainfit.spec.parsing.plain_data import LONE_SURROGATE
from trainfit.training.options import SYNTHETIC, HubData

Row = dict[str, Any]
Placed = tuple[str, Row]
"""A row, and its place for messages, such as ``line 3``."""

READ_CHARS = 1 << 20
MAX_ROW_CHARS = 2**28  # Longest row of a JSON file, which is read whole
PARQUET_ROWS = 256  # Rows of a Parquet file that are Python objects at a time
BETWEEN = re.compile(r"[\s,]*")
ONE_A_LINE = "write one JSON object a line"


def rows_of_file(path: Path) -> Iterator[Placed]:
    """Yield the rows of a .jsonl, .ndjson, .json or .parquet file with their places.

    A .json file holds one array of objects, or an object a line.

    Raises:
        InputError: broken content; it names the file, and the line or row.
    """
    if path.suffix.lower() == ".parquet":
        yield from _parquet(path)
        return
    try:
        with io.TextIOWrapper(files.open_regular(path), encoding="utf-8-sig") as file:
            yield from _json_array(file, path) if _is_array(file, path) else _json_lines(file, path)
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8 text ({error.reason})", "save it as UTF-8", file=str(path)) from None


def _is_array(file: TextIO, path: Path) -> bool:
    """Return whether a .json file begins with a bracket; the file is read from its start again."""
    if path.suffix.lower() != ".json":
        return False
    first = next((text for text in iter(lambda: file.read(256), "") if text.strip()), "")
    file.seek(0)
    return first.lstrip("\ufeff \t\r\n").startswith("[")


def _json_lines(file: TextIO, path: Path) -> Iterator[Placed]:
    for number, line in enumerate(iter(lambda: file.readline(MAX_ROW_CHARS + 1), ""), 1):
        place = f"line {number}"
        if len(line) > MAX_ROW_CHARS:
            raise InputError(f"{place} is over {MAX_ROW_CHARS:,} characters", ONE_A_LINE, file=str(path))
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # ValueError: also over 4,300 digits.
            raise _broken(place, error, path) from None
        yield place, _checked(row, line, place, path)


def _json_array(file: TextIO, path: Path) -> Iterator[Placed]:
    """Yield the objects of one array, of which a megabyte or one object is in memory."""
    decoder, text, number = json.JSONDecoder(), file.read(READ_CHARS), 0
    at = text.index("[") + 1
    while True:
        at = BETWEEN.match(text, at).end()  # type: ignore[union-attr] - it matches nothing, too.
        if text.startswith("]", at):
            return
        place, failure = f"row {number + 1}", None
        try:
            row, end = decoder.raw_decode(text, at)
            # A number at the end may continue in the next megabyte.
            is_whole = end < len(text) or isinstance(row, dict)
        except json.JSONDecodeError as error:
            row, end, is_whole, failure = None, at, False, error
        except (ValueError, RecursionError) as error:
            raise _broken(place, error, path) from None
        if is_whole:
            yield place, _checked(row, text[at:end], place, path)
            at, number = end, number + 1
            continue
        more = file.read(max(READ_CHARS, len(text) - at)) if len(text) - at <= MAX_ROW_CHARS else ""
        if not more:
            if failure is not None and text[at:].strip():
                raise _broken(place, failure, path)
            raise InputError("the array has no end", "the file is cut off: restore it", file=str(path))
        text, at = text[at:] + more, 0


def _broken(place: str, error: Exception, path: Path) -> InputError:
    is_line = place.startswith("line")
    why = "nested too deeply, or too long a number"
    if isinstance(error, json.JSONDecodeError):
        why = f"{error.msg} at column {error.colno}" if is_line else error.msg
    remedy = ONE_A_LINE if is_line else "write an array of objects"
    return InputError(f"{place} is not JSON ({why})", remedy, file=str(path))


def _checked(row: Any, text: str, place: str, path: Path) -> Row:
    if not isinstance(row, dict):
        problem = f"{place} is no JSON object but a {type(row).__name__}"
        raise InputError(problem, 'write {"text": "..."} a line', file=str(path))
    # In JSON a lone surrogate is written as an escape.
    if "\\u" in text and LONE_SURROGATE.search(json.dumps(row, ensure_ascii=False)):
        problem = f"{place} is not Unicode text (a lone surrogate)"
        raise InputError(problem, "write the character itself", file=str(path))
    return row


def _parquet(path: Path) -> Iterator[Placed]:
    parquet: Any = optional("pyarrow.parquet", "datasets", field="data", value=str(path))
    with files.open_regular(path) as stream:
        try:
            file = parquet.ParquetFile(stream)
            number = 0
            for batch in file.iter_batches(batch_size=PARQUET_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row
        except (OSError, ValueError, MemoryError) as error:  # ArrowInvalid is a ValueError.
            if isinstance(error, InputError):
                raise
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise InputError(
                f"not a Parquet file that can be read ({reason[:160]})", "write it anew", file=str(path)
            ) from None


def rows_of_hub(data: HubData) -> Iterator[Placed]:
    """Yield the rows of a dataset of the Hub: from this machine's cache, else streamed.

    Raises:
        InputError: no library, no such dataset, or no network.
    """
    datasets: Any = optional("datasets", "datasets", field="data", value=f"hub:{data.name}")
    try:
        rows = _loaded(datasets, data)
        for number, row in enumerate(islice(rows, data.max_documents), 1):
            yield f"row {number}", row
    except InputError:
        raise
    except Exception as error:  # Its own errors, and those of requests, httpx and fsspec.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        remedy = f"check its name and the network, or use text files or {SYNTHETIC}"
        problem, value = f"dataset cannot be read: {reason}", f"hub:{data.name}"
        raise InputError(problem, remedy, field="data", value=value) from error


def _loaded(datasets: Any, data: HubData) -> Any:
    """Return the rows of a cached dataset, which are mapped into memory; else a stream."""
    if hasattr(datasets, "DownloadConfig"):
        offline = datasets.DownloadConfig(local_files_only=True)
        try:
            return datasets.load_dataset(data.name, data.config, split=data.split, download_config=offline)
        except Exception:  # Not cached, or not whole: the stream reports what is wrong.
            pass
    return datasets.load_dataset(data.name, data.config, split=data.split, streaming=True)
