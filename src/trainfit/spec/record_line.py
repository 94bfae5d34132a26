"""A Record as one line of JSON with a digest of its content, and back, checked.

The digest is the SHA-256 of the canonical JSON (sorted keys, no spaces) of all fields but itself, so a line
keeps it when a tool writes the same content in another order. Lines of older versions have none.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from trainfit.spec.errors import InputError
from trainfit.spec.result import Record
from trainfit.spec.value import canonical_json, parse

DIGEST = "digest"
REPAIR = "restore the file from a copy, or keep its whole rows: trainfit records recover FILE NEW.jsonl"


def digest_of(data: dict[str, Any]) -> str:
    """Return the digest of a record's plain data, in hex; a digest among it is left out."""
    content = {name: value for name, value in data.items() if name != DIGEST}
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()


def to_line(record: Record) -> str:
    """Return the record as JSON on one line, its digest last; without the line's end."""
    text = record.model_dump_json()
    return f'{text[:-1]},"{DIGEST}":"{digest_of(json.loads(text))}"}}'


def from_line(line: str, where: str) -> Record:
    """Return the record of a line that ``to_line`` wrote, or of one without a digest.

    Raises:
        InputError: not a record, or changed content; ``where`` is its file and line.
    """
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"not JSON: {error.msg}", REPAIR, file=where) from None
    except (ValueError, RecursionError):  # An integer of thousands of digits, or thousands of nested lists.
        raise InputError("a number or a nesting that no record has", REPAIR, file=where) from None
    if isinstance(data, dict) and DIGEST in data:
        try:
            found = digest_of(data)
        except ValueError:  # NaN or infinity, which no record holds.
            found = ""
        if data.pop(DIGEST) != found:
            problem = "the content is not what was written (its SHA-256 differs)"
            raise InputError(problem, REPAIR, file=where)
    return parse(Record, data, file=where)


def lines_of(path: str | Path, content: bytes) -> list[tuple[str, str]]:
    """Return the non-empty lines of a JSON Lines file of records, each with its place ``file:number``."""
    lines: list[tuple[str, str]] = []
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            where = f"{path}:{number}"
            try:
                lines.append((line.decode("utf-8"), where))
            except UnicodeDecodeError:
                remedy = "give a JSON Lines file of records"
                raise InputError("not UTF-8 text", remedy, file=where) from None
    return lines
