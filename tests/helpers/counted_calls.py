"""How many functions a program calls, Python's and C's, and how slow this machine is.

The same (to 2 %) on every machine and at every load, which seconds are not: the same code took 5.3 s on one
day and 12 s on another, on machines of the same name. So what must stay fast is bounded in calls, and its
seconds are in the docs.
"""

import cProfile
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROGRAM = """
import atexit, cProfile, pathlib, sys
path = pathlib.Path(sys.argv.pop(1))
profile = cProfile.Profile()
atexit.register(lambda: path.write_text(str(sum(row.callcount for row in profile.getstats()))))
profile.enable()
"""


def command(code: str, count: Path) -> list[str]:
    """Return a command that runs ``code`` in a new interpreter and writes its number of calls."""
    return [sys.executable, "-c", PROGRAM + code, str(count)]


def of(function: Callable[..., Any], *arguments: Any) -> tuple[Any, int]:
    """What ``function`` returns, and how many calls it made."""
    profile = cProfile.Profile()
    result = profile.runcall(function, *arguments)
    return result, sum(row.callcount for row in profile.getstats())


REFERENCE_S = 0.08  # CPU time of the workload on an idle core of the machine on which bounds were chosen


def within(cpu_s: float, bound_s: float) -> bool:
    """Return whether processor time is within a bound that was chosen on the reference machine.

    How slow this machine is is timed once per process, and again where the bound is not met: a machine that
    others use is slower at one time than at another.
    """
    if cpu_s < bound_s * slowness():
        return True
    slowness.cache_clear()
    return cpu_s < bound_s * slowness()


@functools.cache
def slowness() -> float:
    """Return how many times slower than the reference this machine is, at least 1."""
    import torch

    begin_s = time.process_time()
    values = {}
    for number in range(300_000):
        values[number % 1000] = values.get(number % 997, 0) + number
    matrix = torch.ones(256, 256)
    for _ in range(200):
        matrix = (matrix @ matrix).clamp(max=1.0) + 0.1
    return max(1.0, (time.process_time() - begin_s) / REFERENCE_S)
