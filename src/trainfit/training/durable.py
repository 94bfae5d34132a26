"""Write folders and files atomically, and verify every byte of a folder before reading it.

A folder is written under a temporary name, synced to disk with a SHA-256 manifest as its last file, and then
renamed. A finished folder is never written to again.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from trainfit.spec import files
from trainfit.spec.errors import InputError
from trainfit.spec.files import write_text, writing
from trainfit.spec.parsing.plain_data import parse_json
from trainfit.spec.value import canonical_json

MAX_JSON_BYTES = 256 * 10**6
MANIFEST = "manifest.json"
UNFINISHED = ".unfinished-"
"""Prefix of temporary names; the next run in the same folder removes leftovers of a killed process."""


@contextlib.contextmanager
def new_folder(path: Path, *, sealed: bool = True) -> Iterator[Path]:
    """Yield a folder to fill; on exit seal it with a manifest, sync it and rename it to ``path``.

    Args:
        sealed: False writes no manifest, for folders that other programs read.

    Raises:
        FileExistsError: ``path`` exists.
    """
    work = begin_folder(path)
    try:
        yield work
        finish_folder(work, path, sealed=sealed)
    except BaseException as error:
        abandon_folder(work, path, error)
        raise


def begin_folder(path: Path) -> Path:
    """Return a new folder that ``finish_folder`` renames to ``path``; FileExistsError if that exists."""
    if path.exists():
        raise FileExistsError(f"{path}: already there, and a finished folder is never overwritten")
    work = path.with_name(f"{UNFINISHED}{path.name}-{os.getpid()}")
    try:
        work.mkdir(parents=True)
    except OSError as error:
        abandon_folder(work, path, error)
        raise
    return work


def finish_folder(
    work: Path, path: Path, known: Mapping[str, str] | None = None, *, sealed: bool = True
) -> None:
    """Seal ``work`` with a manifest, sync it and rename it; ``known``: SHA-256 sums by name."""
    if sealed:
        _seal(work, known or {})
    else:
        for file in (*sorted(work.iterdir()), work):
            sync(file)
    work.rename(path)
    sync(path.parent)


def abandon_folder(work: Path, path: Path, error: BaseException) -> None:
    """Remove an unfinished folder; re-raise an OSError about one of its files with the file's final path."""
    shutil.rmtree(work, ignore_errors=True)
    name = str(getattr(error, "filename", None) or work)
    if isinstance(error, OSError) and error.errno is not None and name.startswith(str(work)):
        raise OSError(error.errno, error.strerror, str(path) + name.removeprefix(str(work))) from error


def check_folder(path: Path) -> None:
    """Compare every byte of a folder with its manifest; InputError names a file that differs."""
    expected = _read_manifest(path / MANIFEST)
    present = {entry.name for entry in path.iterdir()} - {MANIFEST}
    for name in sorted(present | set(expected)):
        file, problem = path / name, ""
        if name not in expected:
            problem = "not part of what was saved"
        elif name not in present or not file.is_file():
            problem = "missing"
        elif (size := file.stat().st_size) != (saved := expected[name]["bytes"]):
            problem = f"has {size:,} bytes where {saved:,} were saved"
        elif sha256(file) != expected[name]["sha256"]:
            problem = "its content is not what was saved (SHA-256 differs)"
        if problem:
            raise _damaged(file, problem)


def as_json(data: Any) -> str:
    """Return the text of one JSON document; NaN is refused."""
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def write_json(path: Path, data: Any) -> None:
    """Write one JSON document."""
    write_text(path, as_json(data))


def read_json(path: Path) -> Any:
    """Read one JSON document, or raise InputError."""
    return parse_json(files.read_text(path, MAX_JSON_BYTES), str(path))


def replace(path: Path, text: str) -> None:
    """Write a file under a temporary name, sync it and rename it to ``path``."""
    draft = path.with_name(f"{UNFINISHED}{path.name}")
    try:
        write_text(draft, text)
        sync(draft)
        draft.rename(path)
        sync(path.parent)
    finally:
        draft.unlink(missing_ok=True)


def remove_folder(path: Path) -> None:
    """Remove a finished folder; if killed, leave nothing that looks finished."""
    doomed = path.with_name(f"{UNFINISHED}{path.name}-{os.getpid()}")
    path.rename(doomed)
    shutil.rmtree(doomed)


def remove_unfinished(parent: Path) -> None:
    """Remove leftovers of killed processes in ``parent``. Requires the run's lock."""
    for path in parent.glob(f"{UNFINISHED}*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def sha256(path: Path) -> str:
    """Return the hexadecimal digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Force a file's bytes, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with writing(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _seal(work: Path, known: Mapping[str, str] = MappingProxyType({})) -> None:
    sealed = {
        file.name: {"bytes": file.stat().st_size, "sha256": known.get(file.name) or sha256(file)}
        for file in sorted(work.iterdir())
    }
    write_json(work / MANIFEST, {"files": sealed, "sha256": _digest(sealed)})
    for name in sealed:
        # Some libraries write files that only their owner may read.
        shutil.copymode(work / MANIFEST, work / name)
        sync(work / name)
    sync(work / MANIFEST)
    sync(work)


def _read_manifest(path: Path) -> dict[str, dict[str, Any]]:
    try:
        data = json.loads(files.read_bytes(path, MAX_JSON_BYTES))
        sound = [type(one["bytes"]) is int and type(one["sha256"]) is str for one in data["files"].values()]
        if all(sound) and data["sha256"] == _digest(data["files"]):
            return data["files"]
    except FileNotFoundError:
        raise _damaged(path, "missing") from None
    except InputError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass  # A changed manifest, which is refused below.
    raise _damaged(path, "its content is not what was saved")


def _digest(sealed: Any) -> str:
    return hashlib.sha256(canonical_json(sealed).encode()).hexdigest()


def _damaged(file: Path, problem: str) -> InputError:
    remedy = f"restore it from a copy, or remove {file.parent} to go on without it"
    return InputError(problem, remedy, file=str(file))
