"""The message of an OutOfMemoryError, read.

PyTorch's messages changed over the years; these are read, with any of their figures left out, also where
a terminal or a log has wrapped their lines:

    CUDA out of memory. Tried to allocate 256.00 MiB. GPU 0 has a total capacity of 79.18 GiB of which 76.64
    GiB is free. Including non-PyTorch memory, this process has 2.53 GiB memory in use. 1.86 GiB allowed; Of
    the allocated memory 1.69 GiB is allocated by PyTorch, and 99.53 MiB is reserved by PyTorch but
    unallocated.

    CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 23.69 GiB total capacity; 22.30 GiB already
    allocated; 12.94 MiB free; 22.66 GiB reserved in total by PyTorch)
"""

import re
import sys
from itertools import pairwise
from pathlib import Path

from trainfit.spec.errors import InputError
from trainfit.spec.units import GIB, KIB, MIB, TIB
from trainfit.spec.value import Bytes, Value

SIZE = r"(?P<{name}>\d[\d,]{{0,20}}(?:\.\d{{1,9}})?)\s*(?P<unit_of_{name}>bytes|B|[KMGT]i?B)\b"
UNITS = {"B": 1, "K": KIB, "M": MIB, "G": GIB, "T": TIB}
IS_ONE = re.compile(r"out\s+of\s+memory", re.IGNORECASE)
LONGEST_MESSAGE = 1 << 12
LONGEST = 1 << 20
"""Characters of a text that are searched, from the last message on."""


def _size(name: str, pattern: str) -> re.Pattern[str]:
    wrapped = pattern.replace(" ", r"\s+")  # Before SIZE, which has classes of its own.
    return re.compile(wrapped.replace("SIZE", SIZE.format(name=name)), re.IGNORECASE | re.DOTALL)


FIGURES = {
    "requested": (_size("requested", r"tried to allocate SIZE"),),
    "capacity": (_size("capacity", r"total capaci?ty of SIZE"), _size("capacity", r"SIZE total capacity")),
    "free": (_size("free", r"of which SIZE is free"), _size("free", r"; SIZE free")),
    "in_use": (_size("in_use", r"this process has SIZE memory in use"),),
    "others": (_size("others", r"process \d+ has SIZE memory in use"),),
    "allowed": (_size("allowed", r"SIZE allowed"),),
    "allocated": (
        _size("allocated", r"memory SIZE is allocated by PyTorch"),
        _size("allocated", r"SIZE already allocated"),
    ),
    "cached": (_size("cached", r"SIZE is reserved by PyTorch but unallocated"),),
    "reserved": (_size("reserved", r"SIZE reserved in total"),),
}  # fmt: skip


class OutOfMemoryText(Value):
    """What the message says, in bytes; None: it does not say."""

    requested: Bytes
    capacity: Bytes | None = None
    free: Bytes | None = None
    in_use: Bytes | None = None
    """By this process, PyTorch's memory included."""
    others: Bytes | None = None
    """By the first other process that is named."""
    allowed: Bytes | None = None
    """What torch.cuda.set_per_process_memory_fraction allows."""
    allocated: Bytes | None = None
    reserved: Bytes | None = None

    @property
    def cached(self) -> int | None:
        """Bytes that PyTorch holds and does not use."""
        if self.reserved is None or self.allocated is None:
            return None
        return max(0, self.reserved - self.allocated)

    @property
    def room(self) -> int | None:
        """Bytes that PyTorch might still take from the driver."""
        if self.free is None or self.allowed is None or self.reserved is None:
            return self.free
        return min(self.free, max(0, self.allowed - self.reserved))


def has_message(text: str) -> bool:
    """Return whether a text has the message of an OutOfMemoryError."""
    return any(pattern.search(text) for pattern in FIGURES["requested"]) and IS_ONE.search(text) is not None


def read_message(text: str, *, file: str = "") -> OutOfMemoryText:
    """Read the last OutOfMemoryError of a text, such as a log.

    Raises:
        InputError: there is none.
    """
    begins = [match.start() for match in IS_ONE.finditer(text)]
    for begin, end in reversed(list(pairwise([*begins, len(text)]))):
        part = text[begin:end][:LONGEST_MESSAGE]
        sizes = {name: _first(patterns, name, part) for name, patterns in FIGURES.items()}
        found = {name: size for name, size in sizes.items() if size is not None}
        if "requested" in found:
            cached = found.pop("cached", None)
            if cached is not None and "allocated" in found:
                found["reserved"] = found["allocated"] + cached
            return OutOfMemoryText(**found)
    raise InputError(
        "no OutOfMemoryError of PyTorch in it, nor a Trainer's log",
        "give the text from 'CUDA out of memory. Tried to allocate' on",
        file=file,
    )


def last_of(path: Path | None, num_bytes: int) -> str:
    """Return the end of a text file, or of standard input.

    Raises:
        InputError: it cannot be read.
    """
    if path is None:
        kept = b""
        while part := sys.stdin.buffer.read(num_bytes):
            kept = (kept + part)[-num_bytes:]
        return kept.decode("utf-8", "replace")
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - num_bytes))
            return file.read().decode("utf-8", "replace")
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", "name a text file", file=str(path)) from None


def _first(patterns: tuple[re.Pattern[str], ...], name: str, text: str) -> int | None:
    for pattern in patterns:
        if match := pattern.search(text):
            return round(float(match[name].replace(",", "")) * UNITS[match[f"unit_of_{name}"][0].upper()])
    return None
