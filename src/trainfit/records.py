"""Records: evidence in an SQLite file that any number of processes append to, and as JSON Lines.

Records keep the order in which they were appended. A record is on the disk once ``append`` returns, also when
other writers are killed half-way: rollback journal, BEGIN IMMEDIATE, a long busy timeout (a write-ahead log
with read-then-write transactions fails here), full synchronisation.

The payload is the whole record as a line with its digest (spec/provenance.py), checked whenever it is read;
the other columns are copies of what one searches by, which must agree with it. Nothing is appended to a
damaged file.
"""

import errno
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from trainfit.spec import files
from trainfit.spec.errors import InputError
from trainfit.spec.files import write_text
from trainfit.spec.provenance import REPAIR, from_line, lines_of, to_line
from trainfit.spec.recipe import ModelSpec
from trainfit.spec.result import Record

APPLICATION_ID = 0x74726669
"""Marks the file as ours (``trfi`` in ASCII), in the place SQLite's header has for that."""
SCHEMA_VERSION = 1
BUSY_TIMEOUT_S = 60.0
INDEXED = ("kind", "created_at", "recipe_id", "model", "gpu")
COLUMNS = ", ".join((*INDEXED, "payload"))
MAX_LINES_BYTES = 10**9
"""Of a JSON Lines file of records."""

_SCHEMA = (
    "CREATE TABLE records (number INTEGER PRIMARY KEY AUTOINCREMENT, "
    + ", ".join(f"{column} TEXT NOT NULL" for column in (*INDEXED, "payload")) + ")",
    *(f"CREATE INDEX records_{column} ON records ({column})" for column in INDEXED),
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)  # fmt: skip


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
        _check_whole(database, Path(path))
        database.executemany(f"INSERT INTO records ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)", rows)
        database.execute("COMMIT")
    return len(rows)


def read(path: str | Path, kind: str | None = None) -> list[Record]:
    """Return the records (of one ``kind``) in the order they were appended.

    Raises:
        InputError: the file is not there, is not a record file, or is damaged.
    """
    where, given = ("", []) if kind is None else ("WHERE kind = ?", [kind])
    with _open(Path(path), create=False) as database:
        found = database.execute(
            f"SELECT number, {COLUMNS} FROM records {where} ORDER BY number", given
        ).fetchall()
    return [_record(row, f"{path}, record {number}") for number, *row in found]


def export(path: str | Path, out_jsonl: str | Path) -> int:
    """Write the records as JSON Lines; how many. An existing file is replaced, as a whole.

    Raises:
        InputError: ``out_jsonl`` is a record file, whose evidence would be lost; or as ``read``.
    """
    records = read(path)
    replace_text(out_jsonl, "".join(to_line(record) + "\n" for record in records))
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
        write_text(path, text)
        return
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write_text(draft, text)
        draft.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        draft.unlink(missing_ok=True)


def check_can_append(path: str | Path) -> None:
    """Refuse a file that ``append`` would refuse, and one that holds a damaged record. Writes nothing.

    To be called before long work whose result is to be kept.

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
        with _open(path, create=False) as database:
            _check_whole(database, path)
        read(path)


def read_jsonl(path: str | Path) -> list[Record]:
    """Records of a JSON Lines file; blank lines are passed over.

    Raises:
        InputError: a line is not a record, or not the one that was written; it names the file and the line.
    """
    content = files.read_bytes(Path(path), MAX_LINES_BYTES)
    return [from_line(line, where) for line, where in lines_of(path, content)]


def recover(path: str | Path, out_jsonl: str | Path) -> tuple[int, list[str]]:
    """Write the intact records of a damaged file to a new JSON Lines file; ``path`` stays as it is.

    Returns:
        How many were written, and a line for each that is damaged.

    Raises:
        InputError: ``out_jsonl`` is there already.
    """
    out = Path(out_jsonl)
    if out.exists():
        raise InputError("is there already", "name a new file", file=str(out))
    whole, damaged = [], []
    for make in _rows_to_recover(Path(path)):
        try:
            whole.append(make())
        except InputError as error:
            damaged.append(str(error).partition(f"; {REPAIR}")[0])
    replace_text(out, "".join(to_line(record) + "\n" for record in whole))
    return len(whole), damaged


def import_jsonl(path: str | Path, jsonl: str | Path) -> int:
    """Append the records of a JSON Lines file that the record file does not hold yet; how many were new."""
    incoming = read_jsonl(jsonl)
    known = {_row(record)[-1] for record in read(path)} if Path(path).exists() else set()
    fresh = {payload: record for record in incoming if (payload := _row(record)[-1]) not in known}
    return append_all(path, fresh.values())


def load(path: str | Path) -> list[Record]:
    """Return the records of an SQLite file or a JSON Lines file, recognised by its first bytes."""
    return read(path) if is_sqlite(Path(path)) else read_jsonl(path)


def is_sqlite(path: Path) -> bool:
    """Return whether the file begins as every SQLite file does."""
    with files.open_regular(path) as file:
        return file.read(16) == b"SQLite format 3\x00"


def _row(record: Record) -> tuple[str, ...]:
    recipe = record.recipe
    gpu = str(recipe.get("hardware", {}).get("gpu", ""))
    return record.kind, record.created_at, record.recipe_id, model_name(recipe), gpu, to_line(record)


def model_name(recipe: dict[str, Any]) -> str:
    """The model of a record's recipe as people read it, also when that recipe is of an older version."""
    model = recipe.get("model", {})
    return str(ModelSpec.model_construct(config=model.get("config", ""), name=model.get("name")).display_name)


def _record(row: Sequence[Any], where: str) -> Record:
    """The record of a row's ``COLUMNS``, whose copies must agree with the payload."""
    *copies, payload = row
    if not isinstance(payload, str):
        raise InputError("the payload is no text", REPAIR, file=where)
    record = from_line(payload, where)
    written = record.model_copy(update={"recipe_id": record.previous_id or record.recipe_id})
    if copies not in [list(_row(each)[:-1]) for each in (record, written)]:
        raise InputError("the columns do not agree with the payload", REPAIR, file=where)
    return record


def _check_whole(database: sqlite3.Connection, path: Path) -> None:
    """SQLite's own check of the file's structure, and the newest record."""
    (found,) = database.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise sqlite3.DatabaseError(found)
    last = database.execute(f"SELECT number, {COLUMNS} FROM records ORDER BY number DESC LIMIT 1").fetchone()
    if last is not None:
        _record(last[1:], f"{path}, record {last[0]}")


def _rows_to_recover(path: Path) -> Iterator[Callable[[], Record]]:
    """Yield a reader for each row that can still be found."""
    if not is_sqlite(path):
        for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
            if line.strip():
                yield partial(_record_of_bytes, line, f"{path}:{number}")
        return
    with _open(path, create=False) as database:
        counter, end = "SELECT seq FROM sqlite_sequence WHERE name = 'records'", None
        with suppress(sqlite3.DatabaseError):  # Without the counter only the table itself says where it ends.
            end = database.execute(counter).fetchone()
        last = (end and end[0]) or database.execute("SELECT max(number) FROM records").fetchone()[0] or 0
        for number in range(1, last + 1):
            yield partial(_record_of_number, database, number, f"{path}, record {number}")


def _record_of_bytes(line: bytes, where: str) -> Record:
    (found,) = lines_of("", line)
    return from_line(found[0], where)


def _record_of_number(database: sqlite3.Connection, number: int, where: str) -> Record:
    try:
        row = database.execute(f"SELECT {COLUMNS} FROM records WHERE number = ?", [number]).fetchone()
    except sqlite3.DatabaseError as error:
        raise InputError(f"damaged ({error})", REPAIR, file=where) from None
    if row is None:
        raise InputError("missing", REPAIR, file=where)
    return _record(row, where)


@contextmanager
def _open(path: Path, *, create: bool) -> Iterator[sqlite3.Connection]:
    """An open record file, checked; SQLite's complaints become ours."""
    if not create and not path.is_file():
        remedy = "name a file that predict, measure or train wrote with --record"
        raise InputError("no such record file", remedy, file=str(path))
    if path.is_file() and path.stat().st_size and not is_sqlite(path):
        remedy = "name one that --record made; JSON Lines are read by report and records import"
        raise InputError("not an SQLite file", remedy, file=str(path))
    try:
        # isolation_level=None: no transaction begins but the ones written here.
        database = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
    except sqlite3.OperationalError as error:
        raise OSError(f"{path}: {error}") from None
    try:
        _check(database, path, create)
        yield database
    except sqlite3.OperationalError as error:  # locked too long, read-only, disk full
        raise _as_os_error(error, path) from None
    except sqlite3.DatabaseError as error:
        raise InputError(f"damaged ({error})", REPAIR, file=str(path)) from None
    finally:
        database.close()  # Rolls back what was not committed.


def _as_os_error(error: sqlite3.OperationalError, path: Path) -> OSError:
    """The system's error that SQLite's primary result code stands for (sqlite.org/rescode.html)."""
    codes = {
        sqlite3.SQLITE_FULL: errno.ENOSPC,
        sqlite3.SQLITE_IOERR: errno.EIO,
        sqlite3.SQLITE_READONLY: errno.EROFS,
    }
    code = codes.get(getattr(error, "sqlite_errorcode", 0) & 0xFF)
    return OSError(f"{path}: {error}") if code is None else OSError(code, os.strerror(code), str(path))


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
    """Return True for a record file of this version, False for an empty file."""
    names = ("application_id", "user_version")
    application, version = (database.execute(f"PRAGMA {name}").fetchone()[0] for name in names)
    if application == APPLICATION_ID:
        if version != SCHEMA_VERSION:
            remedy = "use the trainfit that wrote it, or export it there"
            remedy = f"{remedy}; this one reads version {SCHEMA_VERSION}"
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
