"""Commits that records name and this repository does not hold, of docs/results/accuracy.md."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache

from benchmarks.tables.joined import RESULTS
from trainfit.report.table import markdown_grid


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


def missing() -> str:
    """Rows whose commit does not exist in this repository, by file."""
    rows = []
    for commit in lost():
        for file, counts in rows_by_file().items():
            rows += [
                [f"`{commit[:7]}{commit[40:]}`", f"`results/{file}`", str(num)]
                for name, num in counts.items()
                if name == commit
            ]
    return markdown_grid(["commit", "file", "rows"], rows, num_text=2)
