"""Writing to disk: whole or not at all, and one error for a disk that does not take it.

Libraries report a full disk by exceptions of their own (safetensors, tokenizers, torch); ``writing`` makes them OSErrors
that name the file. ``Appender`` adds to a file so that a refused write leaves it as it was.
"""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

REMEDIES = {
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "free some of your quota there",
    errno.EROFS: "make it writable, or name another place",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
    errno.EIO: "check the disk",
}
"""By errno: the storage's failures, which are nobody's mistake in a recipe, and what to do."""


class StorageError(OSError):
    """A file that could not be written or read, in one line with its remedy.

    Args:
        error: the system's error.
        remedy: what to do, after which the work can go on.
    """

    def __init__(self, error: OSError, remedy: str = ""):
        super().__init__(error.errno, error.strerror or str(error), error.filename)
        self.remedy = remedy

    def __str__(self) -> str:
        return one_line(self)


def one_line(error: OSError) -> str:
    """Return the file, what failed and what to do, without a line break."""
    remedy = getattr(error, "remedy", "") or REMEDIES.get(error.errno or 0, "")
    where = "" if error.filename is None else f"{_name(error.filename)}: "
    text = f"{where}{error.strerror or OSError.__str__(error)}{f'; {remedy}' if remedy else ''}"
    return " ".join(text.split())


def storage_failure(error: BaseException | None) -> OSError | None:
    """Return the storage's failure that ``error`` is, reports or was raised because of; None: it is something else."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError):
            if error.errno in REMEDIES:
                return error
        elif isinstance(error, Exception) and (code := _code_in(str(error))) is not None:
            return OSError(code, os.strerror(code))
        error = error.__cause__ or error.__context__
    return None


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Name ``path`` in an OSError that names no file; make one of another library's report of a full or failed disk.

    Raises:
        OSError: of the block, with its file.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    except Exception as error:
        code = _code_in(str(error))
        if code is None:
            raise
        raise OSError(code, os.strerror(code), str(path)) from error


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file; an OSError names it."""
    with writing(path):
        path.write_text(text, encoding="utf-8")


class Appender:
    """A file to which whole pieces are added; made if missing. A piece that the disk does not take leaves nothing."""

    def __init__(self, path: Path):
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def lock(self, *, wait: bool = True) -> None:
        """Take the file for this process alone, until it is closed.

        Raises:
            BlockingIOError: another process has it, and ``wait`` is off.
        """
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))

    def append(self, piece: bytes, *, sync: bool = False) -> None:
        """Add ``piece``; with ``sync`` it is on the disk when this returns.

        Raises:
            OSError: it could not be written; the file is as before.
        """
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _code_in(text: str) -> int | None:
    """The errno that another library's message quotes: Rust's "(os error 28)", torch's "(28)", Python's "[Errno 28]"."""
    for code in REMEDIES:
        words = os.strerror(code)
        if (
            any(f"{words} ({prefix}{code})" in text for prefix in ("os error ", ""))
            or f"[Errno {code}] {words}" in text
        ):
            return code
    return None


def _name(path: object) -> str:
    return os.fsdecode(path) if isinstance(path, bytes | str | os.PathLike) else str(path)
