"""What a file is that ``explain`` is given: found by its name, and for JSON by its first bytes."""

import re
import zlib
from pathlib import Path
from typing import Literal

Kind = Literal["snapshot", "text", "script", "ledger", "trace", "trainer state", "recipe"]
STANDARD_INPUT = "-"
SNAPSHOT_SUFFIXES = (".pickle", ".pkl")
TEXT_SUFFIXES = (".txt", ".log", ".out", ".err")
JSON_SUFFIXES = (".json", ".json.gz")
LEDGER_SUFFIX = ".json.gz"
HEAD_BYTES = 1 << 20
"""Before its events a profiler's trace has the devices and the process groups."""
TRACE = re.compile(rb'"traceEvents"\s*:\s*\[|\A\s*\[\s*\{\s*"(?:ph|name|cat|pid|ts)"\s*:')
TRAINER_STATE = re.compile(rb'"log_history"\s*:\s*\[')


def kind_of(name: str) -> Kind:
    """Return the kind of an argument; a name that is no other kind is a recipe's."""
    if name.endswith(SNAPSHOT_SUFFIXES):
        return "snapshot"
    if name == STANDARD_INPUT or name.endswith(TEXT_SUFFIXES):
        return "text"
    if name.endswith(".py"):
        return "script"
    if name.endswith(JSON_SUFFIXES):
        head = _head(Path(name))
        if TRACE.search(head):
            return "trace"
        if TRAINER_STATE.search(head):
            return "trainer state"
        return "ledger" if name.endswith(LEDGER_SUFFIX) else "recipe"
    return "recipe"


def _head(path: Path) -> bytes:
    """Return a file's first bytes, decompressed; none where it cannot be read."""
    if not path.is_file():
        return b""
    try:
        with path.open("rb") as file:
            data = file.read(HEAD_BYTES)
        if path.suffix == ".gz":  # The file may be cut off.
            return zlib.decompressobj(wbits=31).decompress(data, HEAD_BYTES)
        return data
    except (OSError, zlib.error):  # Who reads it says what is wrong with it.
        return b""
