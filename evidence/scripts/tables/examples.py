"""The table of docs/guide/trace.md: training scripts of examples/, traced and measured."""

from __future__ import annotations

import json
from typing import Any

from evidence.scripts.tables.joined import RESULTS

PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes")


def rows() -> list[dict[str, Any]]:
    """Return the runs: command, versions, what was measured and what was predicted."""
    return [json.loads(line) for line in (RESULTS / "examples/h200.jsonl").read_text("utf-8").splitlines()]


def error(row: dict[str, Any], name: str) -> float:
    """Return (predicted - measured) / measured."""
    measured = row["measured"][name]
    return (row["predicted"][name] - measured) / measured
