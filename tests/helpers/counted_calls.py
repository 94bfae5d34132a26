"""How many functions a program calls, Python's and C's.

The same (to 2 %) on every machine and at every load, which seconds are not: the same code took 5.3 s on one
day and 12 s on another, on machines of the same name. So what must stay fast is bounded in calls, and its
seconds are in the docs.
"""

import cProfile
import sys
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
