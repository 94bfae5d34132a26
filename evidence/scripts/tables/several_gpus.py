"""Chosen recipes and scripts for several GPUs, of evidence/pages/accuracy.md."""

from __future__ import annotations

import json
from functools import cache
from typing import Any, NamedTuple

from evidence.scripts.tables.joined import RESULTS
from trainfit.spec.parsing.recipe_file import merge, recipe_from
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import PHASES

Data = dict[str, Any]

SMALL: Data = {"model": {"config": "llama-3.2-1b"}, "batch": {"micro": 2, "seq": 2048}}
LARGE: Data = {"model": {"config": "llama-3.1-8b"}, "batch": {"micro": 1, "seq": 4096}}
TWO: Data = {"hardware": {"gpu": "h200", "count": 2}}
RECIPES: tuple[Data, ...] = (
    {**SMALL},
    {**SMALL, "precision": "fp32", "batch": {"micro": 1, "seq": 1024}},
    {**SMALL, "precision": "amp-bf16"},
    {**SMALL, "recompute": "full"},
    {**SMALL, "recompute": "selective", "optimizer": {"implementation": "foreach"}},
    {**SMALL, "adapter": {"kind": "lora"}},
    {**SMALL, "batch": {"micro": 1, "seq": 2048, "accumulate": 2}},
    {**SMALL, "parallel": {"replicate": 2}},
    {"model": {"config": "qwen3-0.6b", "implementation": "native"}, "batch": {"micro": 2, "seq": 2048}},
    {**SMALL, "compile": "block"},
    {**LARGE},
    {**LARGE, "recompute": "full", "batch": {"micro": 2, "seq": 8192}},
)
"""The recipes of evidence/records/several-gpus/peaks-*.jsonl, whose rows name them by their ids."""


class Comparison(NamedTuple):
    """Peaks of one recipe, predicted and measured on every rank."""

    recipe: Recipe
    predicted: dict[str, Any]
    ranks: list[dict[str, Any]]

    def error_bytes(self) -> int:
        """Return the phase error that is largest, predicted minus measured; every rank counts."""
        errors = [
            self.predicted["phases"][step][phase] - rank[step][phase]
            for rank in self.ranks
            for step in ("first", "steady")
            for phase in PHASES
        ]
        errors += [self.predicted["phases"]["after_init"] - rank["after_init"] for rank in self.ranks]
        return max(errors, key=abs)

    def allocated_error(self) -> float:
        """Return the error of the allocated peak over the measured one, a share; of the first rank."""
        first = self.ranks[0]
        measured = max(first[step][phase] for step in ("first", "steady") for phase in PHASES)
        return (self.predicted_peak() - measured) / measured

    def predicted_peak(self) -> int:
        """Return the largest of the predicted phases, which the measured rows have too."""
        phases = self.predicted["phases"]
        return max(phases[step][phase] for step in ("first", "steady") for phase in PHASES)

    def reserved_error(self) -> float:
        """Return the error of the reserved peak over the measured one, a share; of the first rank."""
        measured = self.ranks[0]["reserved"]
        return (self.predicted["peak_reserved_bytes"] - measured) / measured


@cache
def comparisons() -> tuple[Comparison, ...]:
    """Return the recipes that were predicted and measured, in their order."""
    folder = RESULTS / "several-gpus"
    predicted = {row["recipe_id"]: row["predicted"] for row in _rows(folder / "peaks-predicted.jsonl")}
    measured = {row["recipe_id"]: row["ranks"] for row in _rows(folder / "peaks-measured.jsonl")}
    return tuple(Comparison(one, predicted[one.id], measured[one.id]) for one in map(_on_two, RECIPES))


def _on_two(data: Data) -> Recipe:
    return recipe_from(merge(data, TWO))


def _rows(file: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


@cache
def scripts() -> tuple[Data, ...]:
    """Return peaks of users' scripts on two GPUs, and the error of the allocated peak."""
    rows: dict[str, Data] = {}
    for name in ("scripts-predicted.jsonl", "scripts-measured.jsonl"):
        for line in (RESULTS / "several-gpus" / name).read_text("utf-8").splitlines():
            row = json.loads(line)
            rows.setdefault(row["script"], {}).update(row)
    for row in rows.values():
        measured, predicted = row["ranks"][0]["peak_allocated_bytes"], row["predicted"]
        row["error"] = (predicted["peak_allocated_bytes"] - measured) / measured
    return tuple(rows.values())
