"""Read and write files that a user names.

Reading: regular files alone, within a size limit; a named pipe would block and a device would never end.
Writing: whole or not at all. Libraries (safetensors, tokenizers, torch) report a full disk by exceptions of
their own; ``writing`` makes them OSErrors that name the file.
"""

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from trainfit.spec.errors import InputError

KINDS = (
    (stat.S_ISDIR, "is a folder"), (stat.S_ISFIFO, "is a named pipe"), (stat.S_ISSOCK, "is a socket"),
    (stat.S_ISCHR, "is a device"), (stat.S_ISBLK, "is a device"),
)  # fmt: skip


def open_regular(path: Path, limit_bytes: int | None = None) -> BinaryIO:
    """Return the regular file ``path``, open for reading; ``limit_bytes``: its largest size, None for any.

    Raises:
        InputError: no path, no regular file, links that lead in a circle, or over the limit.
        OSError: the file is missing or cannot be read.
    """
    try:
        _check_kind(path, os.stat(path))
        # O_NONBLOCK: the path may have become a pipe since the check.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except InputError:  # A ValueError too.
        raise
    except ValueError:  # A NUL, or a character that no file name can hold.
        raise InputError("not a path", "name a file", value=str(path)) from None
    except OSError as error:
        raise circle(error, path) or error from None
    file = os.fdopen(descriptor, "rb")
    try:
        found = os.fstat(descriptor)
        _check_kind(path, found)
        if limit_bytes is not None and found.st_size > limit_bytes:
            raise _over(path, limit_bytes)
    except BaseException:
        file.close()
        raise
    return file


def read_bytes(path: Path, limit_bytes: int) -> bytes:
    """Return the content of a regular file of at most ``limit_bytes``; raises as ``open_regular``."""
    with open_regular(path, limit_bytes) as file:
        data = file.read(limit_bytes + 1)  # A file under /proc has size 0, and another may have grown.
    if len(data) > limit_bytes:
        raise _over(path, limit_bytes)
    return data


def read_text(path: Path, limit_bytes: int) -> str:
    """Return the UTF-8 text of a regular file without its byte order mark; raises as ``open_regular``."""
    try:
        return read_bytes(path, limit_bytes).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError("not UTF-8 text", "save it as UTF-8", file=str(path)) from None


def circle(error: OSError, path: object = None) -> InputError | None:
    """Return the refusal of symbolic links that lead in a circle; None for another error."""
    if error.errno != errno.ELOOP:
        return None
    named = str(path if path is not None else error.filename or "")
    return InputError("symbolic links lead in a circle", "name the file itself", file=named)


def _check_kind(path: Path, found: os.stat_result) -> None:
    if stat.S_ISREG(found.st_mode):
        return
    problem = next((words for is_kind, words in KINDS if is_kind(found.st_mode)), "is no regular file")
    remedy = "name a file" if stat.S_ISDIR(found.st_mode) else "save the content in a regular file"
    raise InputError(problem, remedy, file=str(path))


def _over(path: Path, limit_bytes: int) -> InputError:
    size = f"{limit_bytes // 10**6} MB" if limit_bytes >= 10**6 else f"{limit_bytes:,} bytes"
    return InputError(f"the file is over {size}", f"at most {limit_bytes:,} bytes are read", file=str(path))


REMEDIES = {
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "free some of your quota there",
    errno.EROFS: "make it writable, or name another place",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
    errno.EIO: "check the disk",
}
"""Remedies of the storage's failures, which are nobody's mistake in a recipe, by errno."""


class StorageError(OSError):
    """A file that could not be written or read, in one line with its remedy."""

    def __init__(self, error: OSError, remedy: str = ""):
        super().__init__(error.errno, error.strerror or str(error), error.filename)
        self.remedy = remedy

    def __str__(self) -> str:
        return one_line(self)


def one_line(error: OSError) -> str:
    """Return the file, what failed and what to do, without a line break."""
    remedy = getattr(error, "remedy", "") or REMEDIES.get(error.errno or 0, "")
    named = error.filename
    where = "" if named is None else f"{os.fsdecode(named) if isinstance(named, bytes) else named}: "
    text = f"{where}{error.strerror or OSError.__str__(error)}{f'; {remedy}' if remedy else ''}"
    return " ".join(text.split())


def storage_failure(error: BaseException | None) -> OSError | None:
    """Return the storage failure that ``error`` is or was caused by; None: another kind of error."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        if isinstance(error, OSError):
            if error.errno in REMEDIES:
                return error
        elif isinstance(error, Exception) and (code := _code_in(str(error))) is not None:
            return OSError(code, os.strerror(code))
        error = error.__cause__ or error.__context__
    return None


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Name ``path`` in an OSError without a file name; turn libraries' reports of a full disk into one."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    except Exception as error:
        if (code := _code_in(str(error))) is None:
            raise
        raise OSError(code, os.strerror(code), str(path)) from error


def cache_folder() -> Path:
    """Return the folder of what is kept between runs: $TRAINFIT_CACHE, else trainfit/ in the user's cache."""
    own = os.environ.get("TRAINFIT_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(own) if own else Path(base) / "trainfit"


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file; an OSError names it."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file; an OSError names it."""
    with writing(path):
        path.write_bytes(content)


def check_can_write(path: Path, field: str) -> None:
    """Refuse, before long work, a file that could not be written after it. Writes nothing.

    Args:
        field: the option that names it.

    Raises:
        InputError: a folder, or in none.
        OSError: not writable.
    """
    if not path.parent.is_dir():
        raise InputError("no such folder", "make it, or name another", field=field, value=str(path.parent))
    if path.is_dir():
        raise InputError("is a folder", "name a file", field=field, value=str(path))
    there = path if path.exists() else path.parent
    if not os.access(there, os.W_OK):
        raise StorageError(PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(there)),
                           f"make it writable, or name another place with {field}")  # fmt: skip


class Appender:
    """A file to which whole pieces are appended; made if missing. A failed write leaves it unchanged."""

    def __init__(self, path: Path):
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def lock(self, *, wait: bool = True) -> None:
        """Take the file for this process; raises BlockingIOError if it is taken and ``wait`` is off."""
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))

    def append(self, piece: bytes, *, sync: bool = False) -> None:
        """Add ``piece``, with ``sync`` to the disk itself; after an OSError the file is as before."""
        end = os.fstat(self._descriptor).st_size
        try:
            with writing(self.path):
                left = memoryview(piece)
                while left:
                    left = left[os.write(self._descriptor, left) :]
                if sync:
                    os.fsync(self._descriptor)
        except BaseException:
            with contextlib.suppress(OSError):  # Where even that fails, readers find a torn last piece.
                os.ftruncate(self._descriptor, end)
            raise

    def read(self) -> bytes:
        """Return the whole content."""
        return self.path.read_bytes()

    def cut(self, end: int) -> None:
        """Drop everything after the first ``end`` bytes."""
        with writing(self.path):
            os.ftruncate(self._descriptor, end)

    def sync(self) -> None:
        """Force what was added to the disk."""
        with writing(self.path):
            os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> "Appender":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _code_in(text: str) -> int | None:
    """Return the errno quoted by a message: Rust's "(os error 28)", torch's "(28)", Python's "[Errno 28]"."""
    for code in REMEDIES:
        words = os.strerror(code)
        forms = (f"{words} (os error {code})", f"{words} ({code})", f"[Errno {code}] {words}")
        if any(form in text for form in forms):
            return code
    return None
