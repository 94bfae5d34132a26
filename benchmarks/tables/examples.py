"""The table of docs/guide/trace.md: training scripts of examples/, traced and measured."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.tables.joined import RESULTS
from trainfit.report.table import markdown_grid

PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes")


def rows() -> list[dict[str, Any]]:
    """Return the runs: command, versions, what was measured and what was predicted."""
    return [json.loads(line) for line in (RESULTS / "examples/h200.jsonl").read_text("utf-8").splitlines()]


def error(row: dict[str, Any], name: str) -> float:
    """Return (predicted - measured) / measured."""
    measured = row["measured"][name]
    return (row["predicted"][name] - measured) / measured


def scripts() -> str:
    """Peaks of each script in bytes."""
    cells = []
    for row in rows():
        line = [f"`{row['command']}`"]
        for name in PEAKS:
            found = error(row, name)
            line += [f"{row['measured'][name]:,}", f"{found * 100:+.3f}" if found else "0"]
        cells.append(line)
    heads = ["command", "allocated, bytes", "error, %", "reserved, bytes", "error, %"]
    return markdown_grid(heads, cells)
