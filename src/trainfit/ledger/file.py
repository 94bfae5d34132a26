"""Save and load a ledger: JSON with numbered names, compressed by gzip. No torch here."""

import gzip
import json
import os
import tempfile
import zlib
from collections.abc import Iterator
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
    data.pop("expanded", None)
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
        data["events"] = [Event(*row) for row in data["events"]]
        data["collectives"] = [Collective(*row) for row in data["collectives"]]
        data["ops"] = [Op(*_named(row, OP_NAMES, names)) for row in data["ops"]]
        data["storages"] = [Storage._make(_named(row, STORAGE_NAMES, names)) for row in data["storages"]]
        data |= {key: [tuple(row) for row in data[key]] for key in ("pinned", "held")}
        data |= {key: tuple(data[key]) for key in TUPLES}
        return Ledger(**data)
    except (OSError, EOFError, zlib.error, LookupError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: not a whole ledger: {error}") from error


def _named(row: list[Any], name_fields: frozenset[int], names: list[str]) -> Iterator[Any]:
    return (
        names[value] if at in name_fields else tuple(value) if isinstance(value, list) else value
        for at, value in enumerate(row)
    )
