"""Caches of this CPU as Linux reports them, and the rate at which one thread reads sets that they hold."""

import ctypes
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from trainfit.bench.harness.timing import Lap
from trainfit.bench.kernels import cc
from trainfit.spec.units import GIB, KIB, MIB

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
UNITS = {"K": KIB, "M": MIB}
READ_BYTES = {"tiny": 4 * MIB, "full": 256 * MIB}  # Of all turns over a set
MEMORY = "memory of the CPU"


def caches() -> dict[str, int]:
    """Return the bytes of each data cache of the first core by its name (``L1d``); empty: not reported."""
    found: dict[str, int] = {}
    for folder in sorted(CACHES.glob("index*")):
        level, kind, size = ((folder / name).read_text().strip() for name in ("level", "type", "size"))
        number = re.fullmatch(r"(\d+)([KM])", size)
        if kind != "Instruction" and number:
            found[f"L{level}{'d' if kind == 'Data' else ''}"] = int(number[1]) * UNITS[number[2]]
    return found


def sizes() -> dict[str, int]:
    """Return the bytes of each level by the name that its row has."""
    return {f"{name} of the CPU": size for name, size in caches().items()}


def sets(form: str) -> dict[str, int]:
    """Return a set for each level that holds it and whose nearer levels do not; tiny: only small ones."""
    found: dict[str, int] = {}
    nearer = 0
    for name, size in sizes().items():
        found[name] = min(size // 2, 4 * nearer or size)
        nearer = size
    if nearer:
        found[MEMORY] = min(4 * nearer, GIB)
    return {name: size for name, size in found.items() if form == "full" or size <= READ_BYTES["tiny"]}


def turns(set_bytes: int, form: str) -> int:
    """Return how often a set is read in a sample."""
    return max(1, READ_BYTES[form] // set_bytes)


def build(set_bytes: int, form: str) -> Callable[[Lap], object]:
    """Return a run that reads a set ``turns`` times in one thread."""
    held = torch.randint(2**40, (set_bytes // 8,))
    function = cc.library("memory").stream
    function.restype, function.argtypes = ctypes.c_longlong, [ctypes.c_void_p, ctypes.c_long, ctypes.c_long]
    count = turns(set_bytes, form)
    read = partial(function, held.data_ptr(), held.numel())
    expected = sum(int((held.numpy() ^ np.int64(turn)).sum()) for turn in range(2))
    if read(2) != expected:
        raise ArithmeticError("the sum of what was read is wrong")

    def run(lap: Lap) -> None:
        assert held.numel()  # The set lives as long as the run.
        read(count)

    return run
