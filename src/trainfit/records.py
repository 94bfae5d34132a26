"""Records: evidence appended to an SQLite file by any number of processes, read back, and carried as JSON Lines.

Enters: Records (spec/result.py). Leaves: the same, in the order they were appended. A record that ``append`` returned
from is on the disk, also when other writers are killed half-way: rollback journal, BEGIN IMMEDIATE, a long busy
timeout (a write-ahead log with read-then-write transactions fails here), full synchronisation.

The payload is the whole record as JSON; the other columns are copies of what one searches by.
"""

import errno
import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainfit.spec import files
from trainfit.spec.errors import InputError
from trainfit.spec.plain_data import parse_json
from trainfit.spec.recipe import ModelSpec
from trainfit.spec.result import Record
from trainfit.spec.value import parse

APPLICATION_ID = 0x74726669
"""Marks the file as ours (``trfi`` in ASCII), in the place SQLite's header has for that."""
SCHEMA_VERSION = 1
BUSY_TIMEOUT_S = 60.0
MAX_LINES_BYTES = 10**9
"""Of a JSON Lines file of records."""

_SCHEMA = (
    """CREATE TABLE records (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        kind TEXT NOT NULL,
        created_at TEXT NOT NULL,
        recipe_id TEXT NOT NULL,
        model TEXT NOT NULL,
        gpu TEXT NOT NULL,
        payload TEXT NOT NULL
    )""",
    *(
        f"CREATE INDEX records_{column} ON records ({column})"
        for column in ("kind", "created_at", "recipe_id", "model", "gpu")
    ),
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)


def append(path: str | Path, record: Record) -> None:
    """Add one record; the file is made if it is not there. See ``append_all``."""
    append_all(path, [record])


def append_all(path: str | Path, records: Iterable[Record]) -> int:
    """Add records in one transaction: all of them or none. Returns how many.

    Raises:
        InputError: the file is not a record file, is damaged, or is of a newer version.
        OSError: it cannot be written.
    """
    rows = [_row(record) for record in records]
    with _open(Path(path), create=True) as database:
        database.execute("BEGIN IMMEDIATE")
        database.executemany(
            "INSERT INTO records (kind, created_at, recipe_id, model, gpu, payload) VALUES (?, ?, ?, ?, ?, ?)",
            rows,
        )
        database.execute("COMMIT")
    return len(rows)


def read(
    path: str | Path,
    kind: str | None = None,
    *,
    recipe_id: str | None = None,
    model: str | None = None,
    gpu: str | None = None,
    since: str | None = None,
    newest: int | None = None,
) -> list[Record]:
    """The records that match every condition given, in the order they were appended.

    Args:
        model: as people read it (``ModelSpec.display_name``); gpu: the recipe's ``hardware.gpu``.
        since: ISO 8601 in UTC; records made then or later.
        newest: at most this many, the last ones.

    Raises:
        InputError: the file is not there, is not a record file, or is damaged.
    """
    conditions = {
        "kind = ?": kind,
        "recipe_id = ?": recipe_id,
        "model = ?": model,
        "gpu = ?": gpu,
        "created_at >= ?": since,
    }
    given = {text: value for text, value in conditions.items() if value is not None}
    where = f"WHERE {' AND '.join(given)}" if given else ""
    limit = -1 if newest is None else newest  # SQLite: a negative limit is none
    with _open(Path(path), create=False) as database:
        found = database.execute(
            f"SELECT number, payload FROM records {where} ORDER BY number DESC LIMIT ?",
            [*given.values(), limit],
        ).fetchall()
    return [_record(payload, f"{path}, record {number}") for number, payload in reversed(found)]


def export(path: str | Path, out_jsonl: str | Path, kind: str | None = None) -> int:
    """Write the records (of one ``kind``) as JSON Lines; how many. An existing file is replaced, as a whole.

    Raises:
        InputError: ``out_jsonl`` is a record file, whose evidence would be lost; or as ``read``.
    """
    records = read(path, kind)
    text = "".join(record.model_dump_json() + "\n" for record in records)
    replace_text(out_jsonl, text)
    return len(records)


def replace_text(path: str | Path, text: str) -> None:
    """Write a text file whole or not at all, never over a record file.

    Raises:
        InputError: an SQLite file is there.
        OSError: it cannot be written.
    """
    path = Path(path)
    if path.is_file() and is_sqlite(path):
        raise InputError("is an SQLite file, which would be lost", "name another file", file=str(path))
    if path.exists() and not path.is_file():  # A pipe, or /dev/stdout; a folder raises.
        path.write_text(text, encoding="utf-8")
        return
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None


def check_can_append(path: str | Path) -> None:
    """Nothing, if ``append`` would work; asked before long work whose result is to be kept. Writes nothing.

    Raises:
        InputError: the file is no record file, is damaged, or is of another version.
        OSError: no such folder, or not writable.
    """
    path = Path(path)
    try:
        path.stat()
    except FileNotFoundError:
        pass  # It is made.
    except OSError as error:
        raise files.circle(error, path) or error from None
    there = path if path.exists() else path.parent
    if not there.exists():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(there))
    if there == path and not path.is_file():
        raise InputError("is not a file", "name a record file", file=str(path))
    if not os.access(there, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(there))
    if there == path and path.stat().st_size:
        with _open(path, create=False):
            pass


def read_jsonl(path: str | Path) -> list[Record]:
    """Records of a JSON Lines file; blank lines are passed over.

    Raises:
        InputError: a line is not a record; it names the file and the line.
    """
    lines = files.read_text(Path(path), MAX_LINES_BYTES).splitlines()
    return [_record(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]


def import_jsonl(path: str | Path, jsonl: str | Path) -> int:
    """Append the records of a JSON Lines file that the record file does not hold yet; how many were new."""
    incoming = read_jsonl(jsonl)
    known = {_row(record)[-1] for record in read(path)} if Path(path).exists() else set()
    fresh = {payload: record for record in incoming if (payload := _row(record)[-1]) not in known}
    return append_all(path, fresh.values())


def load(path: str | Path) -> list[Record]:
    """Records of an SQLite file or of a JSON Lines file, told apart by the file's first bytes."""
    return read(path) if is_sqlite(Path(path)) else read_jsonl(path)


def is_sqlite(path: Path) -> bool:
    """Whether the file begins as every SQLite file does."""
    with files.open_regular(path) as file:
        return file.read(16) == b"SQLite format 3\x00"


def _row(record: Record) -> tuple[str, ...]:
    recipe = record.recipe
    gpu = str(recipe.get("hardware", {}).get("gpu", ""))
    return record.kind, record.created_at, record.recipe_id, model_name(recipe), gpu, record.model_dump_json()


def model_name(recipe: dict[str, Any]) -> str:
    """The model of a record's recipe as people read it, also when that recipe is of an older version."""
    model = recipe.get("model", {})
    return str(ModelSpec.model_construct(config=model.get("config", ""), name=model.get("name")).display_name)


def _record(payload: str, where: str) -> Record:
    return parse(Record, parse_json(payload, where), file=where)


@contextmanager
def _open(path: Path, *, create: bool) -> Iterator[sqlite3.Connection]:
    """An open record file, checked; SQLite's complaints become ours."""
    if not create and not path.is_file():
        raise InputError(
            "no such record file",
            "name a file that predict, measure or train wrote with --record",
            file=str(path),
        )
    if path.is_file() and path.stat().st_size and not is_sqlite(path):
        raise InputError(
            "not an SQLite file",
            "name one that --record made; JSON Lines are read by report and records import",
            file=str(path),
        )
    try:
        # isolation_level=None: no transaction begins but the ones written here.
        database = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
    except sqlite3.OperationalError as error:
        raise OSError(f"{path}: {error}") from None
    try:
        _check(database, path, create)
        yield database
    except sqlite3.OperationalError as error:  # locked too long, read-only, disk full
        raise OSError(f"{path}: {error}") from None
    except sqlite3.DatabaseError as error:
        raise InputError(
            f"damaged ({error})",
            "restore it from an export, or name another",
            file=str(path),
        ) from None
    finally:
        database.close()  # Rolls back what was not committed.


def _check(database: sqlite3.Connection, path: Path, create: bool) -> None:
    database.execute("PRAGMA synchronous = FULL")
    # One transaction, so all is read at one moment: another process may be making the file.
    database.execute("BEGIN")
    ours = _is_ours(database, path)
    database.execute("COMMIT")
    if not ours and create:
        _make(database, path)
    elif not ours:
        raise InputError("holds no records", "append one first", file=str(path))


def _is_ours(database: sqlite3.Connection, path: Path) -> bool:
    """Whether it is a record file of this version; False: an empty file."""
    application, version = (
        database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
    )
    if application == APPLICATION_ID:
        if version != SCHEMA_VERSION:
            remedy = (
                f"use the trainfit that wrote it, or export it there; this one reads version {SCHEMA_VERSION}"
            )
            raise InputError(f"record file of version {version}", remedy, file=str(path))
        return True
    if application or version or database.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
        raise InputError("an SQLite file, but not one of records", "name another file", file=str(path))
    return False


def _make(database: sqlite3.Connection, path: Path) -> None:
    database.execute("PRAGMA journal_mode = DELETE")
    database.execute("BEGIN IMMEDIATE")
    if not _is_ours(database, path):  # Another process may have made it while we waited for the lock.
        for statement in _SCHEMA:
            database.execute(statement)
    database.execute("COMMIT")
