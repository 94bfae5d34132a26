"""Commits that records name and this repository does not hold, of evidence/pages/accuracy.md."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache

from evidence.scripts.tables.joined import RESULTS


def lost() -> tuple[str, ...]:
    """Return the commits that records name and this repository does not hold."""
    lines = (RESULTS / "lost-commits.txt").read_text("utf-8").splitlines()
    return tuple(line for line in lines if line and not line.startswith("#"))


@cache
def rows_by_file() -> dict[str, Counter[str]]:
    """Return file -> number of rows by the commit that they name."""
    found: dict[str, Counter[str]] = {}
    for file in sorted(RESULTS.rglob("*.jsonl")):
        rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
        named = Counter(row["commit"] for row in rows if isinstance(row, dict) and row.get("commit"))
        found[file.relative_to(RESULTS).as_posix()] = named
    return found
