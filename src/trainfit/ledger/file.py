"""Save and load a ledger: JSON with numbered names, compressed by gzip. No torch here."""

import gzip
import json
import os
import tempfile
import zlib
from pathlib import Path
from typing import Any

from trainfit.ledger.ledger import Collective, Event, Ledger, Op, Segment, Storage

FORMAT = 9
"""Version of the file format; other versions are not read."""
TEXT_FIELDS = frozenset(at for at, field in enumerate(Op._fields) if Op.__annotations__[field] is str)
"""Indices of an operation's fields that are numbered names."""


def save(ledger: Ledger, path: Path) -> None:
    """Write a temporary file in the same folder and rename it; a reader never sees half a ledger."""
    names: dict[str, int] = {}

    def number(text: str) -> int:
        return names.setdefault(text, len(names))

    data = dict(vars(ledger))  # dataclasses.asdict would copy every entry.
    data["ops"] = [[number(v) if isinstance(v, str) else v for v in op] for op in ledger.ops]
    data["storages"] = [[number(v) if isinstance(v, str) else v for v in s] for s in ledger.storages]
    data["events"] = [list(event) for event in ledger.events]
    data["collectives"] = [list(one) for one in ledger.collectives]
    data["segments"] = [list(segment) for segment in ledger.segments]
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
        data["ops"] = [_op(row, names) for row in data["ops"]]
        data["storages"] = [
            Storage(n, names[c], g, op, names[path], stream) for n, c, g, op, path, stream in data["storages"]
        ]
        data["events"] = [Event(*row) for row in data["events"]]
        data["collectives"] = [Collective(*row) for row in data["collectives"]]
        data["ops_without_flops"] = tuple(data["ops_without_flops"])
        data["assumptions"], data["repeats"] = tuple(data["assumptions"]), tuple(data["repeats"])
        data["pinned"] = tuple((num_bytes, group) for num_bytes, group in data["pinned"])
        return Ledger(**data)
    except (OSError, EOFError, zlib.error, LookupError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: not a whole ledger: {error}") from error


def _op(row: list[Any], names: list[str]) -> Op:
    return Op._make(names[value] if at in TEXT_FIELDS else value for at, value in enumerate(row))
