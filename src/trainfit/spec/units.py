"""Units: everything inside is bytes, seconds and FLOPs; these convert only for printing.

GiB is 2**30 bytes, GB is 10**9 bytes.
"""

import math
import re
from collections.abc import Iterable

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12
LEAST, MOST = 1e-24, 1e24
"""Bounds of a number that a user gives: no quantity of training is beyond them, and products stay finite."""


def is_usual(number: float) -> bool:
    """Return whether a number is 0, or of a size that a quantity of training can have."""
    return not number or LEAST <= abs(number) <= MOST


def size_unit(sizes: Iterable[float]) -> tuple[str, int]:
    """Return the name and bytes of the unit that fits the largest size: GiB, or MiB where it is below one."""
    return ("GiB", GIB) if max(sizes, default=GIB) >= GIB else ("MiB", MIB)


def format_bytes(num_bytes: float) -> str:
    """Return a size in binary units: ``57.32 GiB``."""
    return _in_units(num_bytes, {" TiB": TIB, " GiB": GIB, " MiB": MIB, " KiB": KIB}, ".2f", " B")


def format_count(count: float) -> str:
    """Return a count in decimal units: ``8.03B`` is 8.03e9."""
    return _in_units(count, {"T": 1e12, "B": 1e9, "M": 1e6, "K": 1e3}, ".2f", "")


def format_flops(flops: float) -> str:
    """Return FLOPs in decimal units: ``215.2 TFLOP``."""
    units = {" EFLOP": 1e18, " PFLOP": 1e15, " TFLOP": 1e12, " GFLOP": 1e9, " MFLOP": 1e6}
    return _in_units(flops, units, ".4g", " FLOP")


def _in_units(value: float, units: dict[str, float], form: str, smallest: str) -> str:
    for unit, size in units.items():
        if abs(value) >= size:
            return f"{value / size:{form}}{unit}"
    return f"{value:.0f}{smallest}"


COUNT = re.compile(r"(\d[\d,_]*(?:\.\d+)?(?:e[+-]?\d+)?)\s*([kmbt]?)", re.IGNORECASE)
MULTIPLIERS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
DURATION = re.compile(r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?|\.\d+)\s*(us|ms|s|sec|min|h|)", re.IGNORECASE)
SECONDS_OF = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "": 1.0, "min": 60.0, "h": 3600.0}
SHARE = re.compile(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*(%?)", re.IGNORECASE)


def read_count(text: str) -> float:
    """Read a count such as ``100B``, ``15T``, ``1.5e12`` or ``1,000,000``; other text is a ValueError."""
    count = math.inf
    if found := COUNT.fullmatch(text.strip()):
        count = float(re.sub("[,_]", "", found[1])) * MULTIPLIERS[found[2].lower()]
    if not is_usual(count):
        raise ValueError(f"{text!r} is not a count: write it as 100B, 1.5T or 1.5e12")
    return count


def read_share(text: str) -> float:
    """Read a share: ``40%`` and ``0.4`` are 0.4; other text, or more than 1, is a ValueError."""
    found = SHARE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a share: write it as 40% or 0.4")
    share = float(found[1]) / (100 if found[2] else 1)
    if share < 1 and not is_usual(share):
        raise ValueError(f"{text!r} is too small for a share: write it as 40% or 0.4")
    if share > 1:
        meant = f"did you mean {found[1]}%?" if not found[2] and share <= 100 else "at most 100% is possible"
        raise ValueError(f"{text!r} is more than 1: {meant}")
    return share


SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def read_bytes(text: str) -> int:
    """Read a size: ``5GB`` is 5e9 bytes and ``5GiB`` 5 * 2**30; other text is a ValueError."""
    found = SIZE.fullmatch(text.strip())
    size = (
        float(found[1]) * (KIB if found[3] else KB) ** " kmgt".index(found[2].lower() or " ") if found else 0
    )
    if not 1 <= size <= MOST:
        raise ValueError(f"{text!r} is not a size: write it as 5GB or 500MB")
    return int(size)


def read_seconds(text: str) -> float:
    """Read a duration: ``448ms``, ``1.2s``, ``2min``, or a number of seconds; other text is a ValueError."""
    found = DURATION.fullmatch(text.strip())
    seconds = float(found[1]) * SECONDS_OF[found[2].lower()] if found else math.inf
    if found is None or (seconds and not is_usual(seconds)):
        raise ValueError(f"{text!r} is no duration: write it as 448ms, 1.2s or 0.448")
    return seconds


def format_seconds(seconds: float) -> str:
    """Return a duration: ``431 ms``, ``2 h 05 min``, ``70 d 06 h``."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    if seconds < 48 * 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"
    return f"{int(seconds // 86400):,} d {int(seconds % 86400 // 3600):02d} h"
