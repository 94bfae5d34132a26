"""Save and load a ledger: JSON with numbered names, compressed by gzip. No torch here."""

import gzip
import itertools
import json
import os
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from trainfit.ledger.ledger import Collective, Event, Ledger, Op, Segment, Storage

FORMAT = 17
"""Version of the file format; other versions are not read."""
TUPLES = ("ops_without_flops", "assumptions", "warnings", "repeats", "pinned", "emptied_at", "compiled")
OP_NAMES, STORAGE_NAMES = (
    frozenset(at for at, kind in enumerate(row.__annotations__.values()) if kind is str)
    for row in (Op, Storage)
)
"""Indices of the fields that are numbered names."""


def save(ledger: Ledger, path: Path) -> None:
    """Write a temporary file in the same folder and rename it; a reader never sees half a ledger."""
    names: dict[str, int] = {}

    def number(text: str) -> int:
        return names.setdefault(text, len(names))

    data = dict(vars(ledger))  # dataclasses.asdict would copy every entry.
    for derived in ("expanded", "kept_in"):
        data.pop(derived, None)
    for key in ("ops", "storages"):
        data[key] = [[number(v) if isinstance(v, str) else v for v in row] for row in data[key]]
    data["names"], data["format"] = list(names), FORMAT
    path.parent.mkdir(parents=True, exist_ok=True)
    # A unique name: several processes may save the same ledger at once.
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".draft", delete=False) as draft:
        try:
            draft.write(gzip.compress(json.dumps(data).encode(), 1))
            draft.close()
            os.replace(draft.name, path)
        except BaseException:
            os.unlink(draft.name)
            raise


def load(path: Path) -> Ledger:
    """Read a file that ``save`` wrote.

    Raises:
        ValueError: another format, or a damaged file.
    """
    try:
        data: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
        if data.pop("format") != FORMAT:
            raise ValueError(f"{path}: not a ledger of format {FORMAT}")
        names = data.pop("names")
        data["segments"] = [Segment(*row) for row in data["segments"]]
        data["events"] = list(itertools.starmap(Event, data["events"]))
        data["collectives"] = [Collective(*row) for row in data["collectives"]]
        for key, kind, name_fields in (("ops", Op, OP_NAMES), ("storages", Storage, STORAGE_NAMES)):
            data[key] = list(map(kind, *_columns(data[key], name_fields, names))) if data[key] else []
        data |= {key: [tuple(row) for row in data[key]] for key in ("pinned", "held")}
        data |= {key: tuple(data[key]) for key in TUPLES}
        return Ledger(**data)
    except (OSError, EOFError, zlib.error, LookupError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: not a whole ledger: {error}") from error


def _columns(rows: list[list[Any]], name_fields: frozenset[int], names: list[str]) -> Iterator[Iterable[Any]]:
    """Yield the values of each field of all rows, with names for their numbers and tuples for lists."""
    for at, column in enumerate(zip(*rows, strict=True)):
        if at in name_fields:
            yield map(names.__getitem__, column)
        elif list in set(map(type, column)):
            yield [tuple(value) if isinstance(value, list) else value for value in column]
        else:
            yield column
