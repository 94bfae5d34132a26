"""Check a regular expression that names modules, before PEFT matches it against each of them.

A short pattern can make Python's matcher backtrack for longer than anyone waits, and nothing can interrupt
it. So a pattern that repeats anything is first tried in a process whose time is limited.
"""

import json
import re
import subprocess
import sys
from collections.abc import Sequence

from trainfit.spec.errors import InputError

MAX_PATTERN_CHARS = 10_000
MAX_GROUPS = 100
"""Deeper nesting than Python compiles, depending on the depth of the stack, is refused at any depth."""
CPU_SECONDS = 1  # Matching a pattern such as .*_proj against a thousand names takes a millisecond
WALL_SECONDS = 60
CAN_BACKTRACK = re.compile(r"[*+?{|]")
MATCH = f"""
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({CPU_SECONDS}, {CPU_SECONDS}))
pattern, names = json.load(sys.stdin)
compiled = re.compile(pattern)
for name in names:
    compiled.fullmatch(name)
"""


def check_pattern(pattern: str, names: Sequence[str]) -> None:
    """Refuse a pattern that is no regular expression, or whose matching against ``names`` takes too long."""
    if len(pattern) > MAX_PATTERN_CHARS:
        raise _refused(pattern, f"is over {MAX_PATTERN_CHARS:,} characters", "write a list of names")
    if pattern.count("(") > MAX_GROUPS:
        raise _refused(pattern, f"has over {MAX_GROUPS} groups", "write a simpler one, or a list of names")
    try:
        re.compile(pattern)
    except re.error as error:
        raise _refused(pattern, f"not a regular expression: {error}", "correct it, or write a list") from None
    except (RecursionError, OverflowError):
        problem = "not a regular expression that can be compiled"
        raise _refused(pattern, problem, "write a simpler one, or a list of names") from None
    if CAN_BACKTRACK.search(pattern) and not _matches_in_time(pattern, names):
        problem = f"matching it against the model's modules takes over {CPU_SECONDS} s"
        raise _refused(pattern, problem, "repeat nothing that repeats, or write a list of names")


def _matches_in_time(pattern: str, names: Sequence[str]) -> bool:
    command, names_json = [sys.executable, "-I", "-S", "-c", MATCH], json.dumps([pattern, list(names)])
    try:
        return not subprocess.run(
            command, input=names_json.encode(), capture_output=True, timeout=WALL_SECONDS
        ).returncode
    except subprocess.TimeoutExpired:
        return False


def _refused(pattern: str, problem: str, remedy: str) -> InputError:
    return InputError(problem, remedy, field="adapter.targets", value=pattern)
