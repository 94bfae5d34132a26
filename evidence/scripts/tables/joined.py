"""Records of ``evidence/records/``, and predictions joined with measurements of the same library versions."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from trainfit.records import load
from trainfit.report.compare import Comparison
from trainfit.report.table import markdown_cell
from trainfit.spec.parsing.parse import parse
from trainfit.spec.provenance import release
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Record

RESULTS = Path(__file__).parents[2] / "records"
SUITE = "h200-*.jsonl"
FIRST_FILE = "first-predicted/h200.jsonl"
"""The accuracy suite, and its predictions as first committed."""
SMOOTHED = 50  # Steps of which a curve of losses shows the mean
UNNAMED = ("2.11.0", "5.17.0")
"""Versions of torch and transformers of the records that name none (evidence/README.md)."""


@cache
def records(*patterns: str) -> tuple[Record, ...]:
    """Return the records of the files below ``evidence/records/`` that match, ordered by file name."""
    files = sorted({file for pattern in patterns for file in RESULTS.glob(pattern)})
    return tuple(record for file in files for record in load(file))


def trained_runs(*patterns: str) -> dict[str, Record]:
    """Return the newest finished or diverged training run of these files by variant."""
    found: dict[str, Record] = {}
    for record in sorted(records(*patterns), key=lambda one: one.created_at):
        is_over = record.outcome is not None and record.outcome.status in ("done", "diverged")
        if record.kind == "train" and is_over:
            name = next(tag.removeprefix("variant:") for tag in record.tags if tag.startswith("variant:"))
            found[name] = record
    return found


def smoothed(losses: Sequence[float]) -> list[float]:
    """Return the mean of each SMOOTHED steps."""
    chunks = [losses[at : at + SMOOTHED] for at in range(0, len(losses), SMOOTHED)]
    return [sum(chunk) / len(chunk) for chunk in chunks]


def recipe_of(record: Record) -> Recipe:
    """Return the record's recipe."""
    return parse(Recipe, record.recipe, file=f"record of {record.created_at}")


def describe(recipe: Recipe) -> str:
    """Return model, batch and what sets the recipe apart, as a cell of a table."""
    one = Comparison(recipe, None, None)
    return markdown_cell(f"{one.model}, {one.batch}, {one.technique}")


def versions_of(record: Record) -> tuple[str, str]:
    """Return the versions of torch and transformers that a prediction or a measurement was made with."""
    if record.measurement is not None:
        environment = record.measurement.environment
        found = (environment.torch, environment.transformers or "")
    else:
        named = record.estimate.versions if record.estimate is not None else {}
        found = (named.get("torch", UNNAMED[0]), named.get("transformers", UNNAMED[1]))
    torch, transformers = map(release, found)
    return torch, transformers


def join(some: Iterable[Record]) -> list[Comparison]:
    """Return a comparison of each measured recipe, versions and device; ordered by recipe id.

    The newest prediction and the newest measurement count. A prediction made with other versions of torch or
    transformers than the measurement is not joined with it.
    """
    predicted: dict[tuple[str, tuple[str, str]], Record] = {}
    measured: dict[tuple[str, tuple[str, str], str], Record] = {}
    for record in sorted(some, key=lambda record: record.created_at):
        if record.estimate is not None:
            predicted[record.recipe_id, versions_of(record)] = record
        elif record.measurement is not None:
            device = record.measurement.environment.device
            measured[record.recipe_id, versions_of(record), device] = record
    return [_comparison(predicted.get(key[:2]), record) for key, record in sorted(measured.items())]


def _comparison(prediction: Record | None, measurement: Record) -> Comparison:
    estimate = prediction.estimate if prediction is not None else None
    return Comparison(recipe_of(measurement), estimate, measurement.measurement)


def errors(pairs: Sequence[Comparison], field: str) -> list[float]:
    """Return (predicted - measured) / measured of a field, of the recipes that have both."""
    return [error for one in pairs if (error := one.error(field)) is not None]


def lost_commits() -> tuple[str, ...]:
    """Return the commits that records name and HEAD does not descend from."""
    lines = (RESULTS / "lost-commits.txt").read_text("utf-8").splitlines()
    return tuple(line for line in lines if line and not line.startswith("#"))


@cache
def commits_by_file() -> dict[str, Counter[str]]:
    """Return file -> number of rows by the commit that they name."""
    found: dict[str, Counter[str]] = {}
    for file in sorted(RESULTS.rglob("*.jsonl")):
        rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
        named = Counter(row["commit"] for row in rows if isinstance(row, dict) and row.get("commit"))
        found[file.relative_to(RESULTS).as_posix()] = named
    return found
