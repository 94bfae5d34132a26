"""Recipes predicted before they were measured, of evidence/pages/accuracy.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from evidence.scripts.tables.errors import exact, in_head, share, worst
from evidence.scripts.tables.joined import FIRST_FILE, records, versions_of
from trainfit.report.table import NOTHING, markdown_grid
from trainfit.spec.result import Estimate, Record

BLIND: dict[str, tuple[str, ...]] = {
    "drawn around one technique, 2026-11-21": ("9d5942d", "47d6eac", "736a8e0"),
    "drawn around one technique, 2026-11-22": ("7648115",),
}
"""Recipes that were predicted before they were measured: title -> commits of their first predictions."""
SWEEPS = {
    "sweep: peak memory, 1.6B": "peak-memory/records.jsonl",
    "sweep: memory budgets, 1.6B": "peak-memory-pareto/records.jsonl",
    "sweep: separate effects, 1.6B": "peak-memory-separate/records.jsonl",
    "sweep: recomputation budgets, Llama-3.1-8B": "recompute-budget-llama-3.1-8b/records.jsonl",
    "sweep: ladder, Llama-3.2-1B": "ladder-llama-3.2-1b/records.jsonl",
    "sweep: ladder, Qwen3-4B": "ladder-qwen3-4b/records.jsonl",
    "sweep: quality of techniques, Llama-3.2-1B": "technique-quality/records.jsonl",
}
EVERY = ("h200-*.jsonl", "*/records.jsonl", "*/measured.jsonl", "peak-memory/device/*.jsonl")
"""Every file with measurements."""


@dataclass(frozen=True)
class Blind:
    """A recipe predicted before any measurement of it, with its first measurement."""

    predicted: Estimate
    allocated_bytes: int | None
    """None: it ran out of memory."""
    device_bytes: int | None

    @property
    def error(self) -> float | None:
        """Predicted minus measured allocated peak, over measured."""
        held = self.allocated_bytes
        return (self.predicted.peak_allocated_bytes - held) / held if held else None

    @property
    def device_error(self) -> float | None:
        """The same of the device's memory."""
        held = self.device_bytes
        return (self.predicted.peak_device_bytes - held) / held if held else None


@cache
def by_title() -> dict[str, list[Blind]]:
    """Return the recipes that were predicted before they were measured, by the title of their group."""
    first = records(FIRST_FILE)
    groups = {
        title: _joined(one for one in first if (one.commit or "").startswith(commits))
        for title, commits in BLIND.items()
    }
    groups |= {title: _joined(one for one in records(file) if one.estimate) for title, file in SWEEPS.items()}
    return {**groups, "two versions of transformers": _joined(records("versions/predicted.jsonl"))}


def _joined(predictions: Iterable[Record]) -> list[Blind]:
    found: dict[tuple[str, tuple[str, str]], Blind] = {}
    for record in sorted(predictions, key=lambda record: record.created_at):
        key = (record.recipe_id, versions_of(record))
        measured = _first_measurements().get(key)
        if measured is None or record.estimate is None or key in found:
            continue
        if record.created_at < measured.created_at:
            found[key] = Blind(record.estimate, *_peaks(measured))
    return list(found.values())


@cache
def _first_measurements() -> dict[tuple[str, tuple[str, str]], Record]:
    """Return the oldest measurement, or training run, of each recipe and versions."""
    ended = [record for record in records(*EVERY) if _status(record) in ("done", "out-of-memory")]
    newest_first = sorted(ended, key=lambda record: record.created_at, reverse=True)
    return {(record.recipe_id, versions_of(record)): record for record in newest_first}


def _status(record: Record) -> str:
    if record.measurement is not None:
        return record.measurement.status
    return record.train["status"] if record.train is not None else ""


def _peaks(record: Record) -> tuple[int | None, int | None]:
    if _status(record) != "done":
        return None, None
    if record.measurement is not None:
        return record.measurement.peak_allocated_bytes, record.measurement.peak_device_bytes
    assert record.train is not None
    return record.train["peak_memory_bytes"], None


def groups() -> str:
    """Return recipes predicted before they were measured, by kind."""
    kinds = {
        "drawn around one technique": BLIND,
        "of sweeps": SWEEPS,
        "all, and two of other versions": by_title(),
    }
    rows = [
        _row(kind, [one for title in titles for one in by_title()[title]]) for kind, titles in kinds.items()
    ]
    return markdown_grid(["recipes", "ran", "to the byte", "worst, %", "device: ran", "worst, %"], rows)


def _row(title: str, found: Sequence[Blind]) -> list[str]:
    allocated = [one.error for one in found if one.error is not None]
    device = [one.device_error for one in found if one.device_error is not None]
    return [
        title, str(len(allocated)), str(exact(allocated)), in_head(share(worst(allocated), signed=True)),
        str(len(device)), in_head(share(worst(device), signed=True)) if device else NOTHING,
    ]  # fmt: skip
