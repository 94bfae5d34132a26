"""Open files that someone names: regular files alone, within a size limit, without waiting.

A named pipe would block, a device would never end, and a symbolic link may lead back to itself. All of them are
refused before a byte is read, as is a file over its limit.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from trainfit.spec.errors import InputError

KINDS = (
    (stat.S_ISDIR, "is a folder"),
    (stat.S_ISFIFO, "is a named pipe"),
    (stat.S_ISSOCK, "is a socket"),
    (stat.S_ISCHR, "is a device"),
    (stat.S_ISBLK, "is a device"),
)


def open_regular(path: Path, limit_bytes: int | None = None) -> BinaryIO:
    """Return the regular file ``path``, open for reading.

    Args:
        limit_bytes: the largest size that is read; None where the file is read a piece at a time.

    Raises:
        InputError: no path, no regular file, links that lead in a circle, or over the limit.
        OSError: the file is missing or cannot be read.
    """
    try:
        _check_kind(path, os.stat(path))
        # Not waiting matters only if the path came to name a pipe since it was looked at.
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
    """Return the content of a regular file of at most ``limit_bytes``.

    Raises:
        InputError: as ``open_regular``.
        OSError: the file is missing or cannot be read.
    """
    with open_regular(path, limit_bytes) as file:
        data = file.read(limit_bytes + 1)  # A file under /proc has size 0, and another may have grown.
    if len(data) > limit_bytes:
        raise _over(path, limit_bytes)
    return data


def read_text(path: Path, limit_bytes: int) -> str:
    """Return the UTF-8 text of a regular file of at most ``limit_bytes``; a byte order mark is dropped.

    Raises:
        InputError: as ``open_regular``, or not UTF-8.
        OSError: the file is missing or cannot be read.
    """
    try:
        return read_bytes(path, limit_bytes).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError("not UTF-8 text", "save it as UTF-8", file=str(path)) from None


def circle(error: OSError, path: object = None) -> InputError | None:
    """Return the refusal of symbolic links that lead in a circle, if that is what ``error`` says."""
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
