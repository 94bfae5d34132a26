"""Step times on one H200, predicted anew and measured, of evidence/pages/accuracy.md."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from evidence.scripts.accuracy.held_out import is_held_out
from evidence.scripts.step_time import measured
from evidence.scripts.tables.errors import percentile_95, worst
from evidence.scripts.tables.joined import RESULTS, join
from trainfit.catalog.rates import Band
from trainfit.prediction.time.roofline import HOST_BOUND, Roofline
from trainfit.records import load
from trainfit.report.compare import Comparison
from trainfit.report.table import markdown_grid
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.parse import parse
from trainfit.spec.provenance import DIGEST, REPAIR, digest_of
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import StepTime

FILE = RESULTS / "step-time" / "predicted.jsonl"
HOSTS = {
    "other-host": "second",
    "blind": "third (drawn recipes)",
    "host1": "fourth",
    "host2": "fifth",
    "blind-again": "sixth (drawn recipes)",
}
"""Files of one GPU's steps, predicted with the catalog's host and that of their machine -> the machine."""
TWO_GPUS = {
    "../several-gpus/own-host-1": "fourth",
    "../several-gpus/own-host-2": "fifth",
    "../several-gpus/own-host-3": "seventh",
}
"""The same of two GPUs' steps."""
H100 = ("h100", "h100-again", "h100-third")
"""Machines with one H100."""


class Step(NamedTuple):
    """A recipe's measured step and its prediction, in seconds."""

    recipe: Recipe
    measured_s: float
    predicted_s: float
    parts: StepTime

    @property
    def error(self) -> float:
        """Predicted minus measured, over measured."""
        return self.predicted_s / self.measured_s - 1

    @property
    def is_inside(self) -> bool:
        """Whether the measured step is within today's bounds, not those of the record."""
        return self.band.low <= self.measured_s / self.predicted_s <= self.band.high

    @property
    def band(self) -> Band:
        """The bounds of a known host, over the expected step: the rates are of these machines' hosts."""
        return Roofline(self.parts, 0.0).band(compiled=self.is_compiled, own_host=True)

    @property
    def is_held_out(self) -> bool:
        return is_held_out(self.recipe.id)

    @property
    def is_compiled(self) -> bool:
        return self.recipe.compile is not False

    @property
    def host_decides(self) -> bool:
        """Whether the GPU is expected to wait for the host for a good part of the step."""
        return _waits(self.parts)


def rows(file: Path = FILE) -> list[dict[str, Any]]:
    """Return the rows of the file of predictions.

    Raises:
        InputError: a row's digest is not that of its content.
    """
    found = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    for number, row in enumerate(found, 1):
        if row[DIGEST] != digest_of(row):
            problem = "the content is not what was written (its SHA-256 differs)"
            raise InputError(problem, REPAIR, file=f"{file}:{number}")
    return found


@cache
def steps(file: Path = FILE) -> tuple[Step, ...]:
    """Return the recipes that are measured and predicted, ordered by id."""
    by_id = {row["recipe_id"]: row for row in rows(file)}
    return tuple(
        Step(
            recipe, took_s, row["step_s"], parse(StepTime, row["parts"])
        )
        for recipe, took_s in sorted(measured(), key=lambda each: each[0].id)
        if (row := by_id.get(recipe.id))
    )  # fmt: skip


def groups() -> dict[str, list[Step]]:
    """Return the steps by half, kind of code and what decides."""
    halves = {"learned from": False, "held out": True}
    kinds = {"eager": False, "compiled": True}
    deciding = {"the GPU decides": False, "the host decides": True}
    return {
        ", ".join(names): [
            one
            for one in steps()
            if (one.is_compiled, one.is_held_out, one.host_decides)
            == (kinds[names[0]], halves[names[1]], deciding[names[2]])
        ]
        for names in itertools.product(kinds, halves, deciding)
    }


def table() -> str:
    """Return the errors and the bounds of each group of those held out."""
    cells = [[name, *_cells(mine)] for name, mine in groups().items() if mine and mine[0].is_held_out]
    heads = ["steps", "recipes", "median, %", "95th percentile, %", "worst, %", "within the bounds, %",
             "bounds"]  # fmt: skip
    return markdown_grid(heads, cells)


def _cells(mine: Sequence[Step]) -> list[str]:
    errors = [one.error for one in mine]
    inside = sum(one.is_inside for one in mine) / len(mine)
    most = percentile_95(errors) if len(errors) > 1 else abs(errors[0])
    return [
        str(len(mine)),
        *(f"{100 * value:.1f}" for value in (median(map(abs, errors)), most)),
        f"{100 * worst(errors):+.1f}",
        f"{100 * inside:.0f}",
        f"{mine[0].band.low:.2f} to {mine[0].band.high:.2f}",
    ]


def on_host(name: str, *, waits: bool | None = True) -> list[dict[str, Any]]:
    """Return the held-out rows of a machine.

    Args:
        waits: only those that the catalog's host is, or is not, expected to decide; None: all.
    """
    return [
        row
        for row in rows(FILE.parent / f"{name}.jsonl")
        if is_held_out(row["recipe_id"]) and waits in (None, row["host_s"] > HOST_BOUND * row["predicted_s"])
    ]


@cache
def drawn() -> dict[str, list[Comparison]]:
    """Return the drawn recipes by machine, each with the prediction that was committed before."""
    before = load(FILE.with_name("blind-predicted.jsonl"))
    machines = {"third": "blind-measured.jsonl", "sixth": "blind-again-measured.jsonl"}
    return {machine: join([*before, *load(FILE.with_name(name))]) for machine, name in machines.items()}


def drawn_groups() -> dict[str, list[Comparison]]:
    """Return the drawn recipes by machine and by what decides, as predicted."""
    deciding = {"the GPU decides": False, "the host decides": True}
    return {
        f"{machine}, {name}": [
            one
            for one in mine
            if one.predicted and one.predicted.time and _waits(one.predicted.time) == waits
        ]
        for machine, mine in drawn().items()
        for name, waits in deciding.items()
    }


def drawn_table() -> str:
    """Return the errors of the drawn recipes' steps, as first committed."""
    lines = []
    for name, mine in drawn_groups().items():
        errors = [error for one in mine if (error := one.error("step_s")) is not None]
        middle, most = 100 * median(map(abs, errors)), 100 * worst(errors)
        lines.append([name, str(len(errors)), f"{middle:.1f}", f"{most:+.1f}"])
    return markdown_grid(["machine, steps", "recipes", "median, %", "worst, %"], lines)


def _waits(parts: StepTime) -> bool:
    return parts.host_s > HOST_BOUND * parts.total


def hosts_table() -> str:
    """Return the errors of held-out steps that the host decides, on machines whose host was calibrated."""
    return _by_machine({title: on_host(name) for name, title in HOSTS.items()})


def two_gpus_table() -> str:
    """Return the errors of held-out steps of two GPUs, on machines whose host was calibrated."""
    return _by_machine({title: on_host(name, waits=None) for name, title in TWO_GPUS.items()})


def h100() -> list[Comparison]:
    """Return the recipes measured on one H100, each with the newest prediction that was committed before."""
    before = [
        *load(FILE.with_name("h100-predicted.jsonl")),
        *load(FILE.with_name("h100-calibrated-predicted.jsonl")),
    ]
    known = {one.recipe_id: one.estimate for one in before}
    rows = [one for name in H100 for one in load(FILE.with_name(f"{name}-measured.jsonl"))]
    return [
        Comparison(parse(Recipe, one.recipe), known[one.recipe_id], one.measurement)
        for one in rows
        if one.measurement is not None and one.measurement.step_times is not None
    ]


def h100_rows() -> dict[bool, list[dict[str, Any]]]:
    """Return the rows of one H100 by whether the catalog's host is expected to decide them."""
    every = rows(FILE.with_name("h100.jsonl"))
    return {
        waits: [row for row in every if (row["host_s"] > HOST_BOUND * row["predicted_s"]) == waits]
        for waits in (False, True)
    }


def h100_table() -> str:
    """Return the errors of steps of one H100: by an H200's operations, by its own, and with its host too."""
    folder = FILE.parent
    before = {one.recipe_id: one.estimate for one in load(folder / "h100-predicted.jsonl")}
    first = {one.recipe_id for one in load(folder / "h100-calibrated-predicted.jsonl")}
    found = h100_rows()
    lines = []
    for title, waits in {"the GPU decides": False, "the host decides": True}.items():
        mine = found[waits]
        blind = [row for row in mine if row["recipe_id"] in first]
        lines += [_of_h100(title, mine, before), _of_h100(f"{title}, predicted first", blind, before)]
    heads = ["steps", "recipes", "an H200's operations: median, %", "worst, %", "an H100's: median, %",
             "worst, %", "within its bounds", "and its own host: median, %", "worst, %",
             "within its bounds"]  # fmt: skip
    return markdown_grid(heads, lines)


def _of_h100(title: str, mine: Sequence[dict[str, Any]], before: dict[str, Any]) -> list[str]:
    cells = [title, str(len(mine))]
    kinds: list[tuple[list[float], str | None]] = [
        ([before[row["recipe_id"]].step_s for row in mine], None),
        ([row["predicted_s"] for row in mine], "catalog_"),
        ([row["calibrated_s"] for row in mine], ""),
    ]
    for predicted, prefix in kinds:
        errors = [seconds / row["step_s"] - 1 for seconds, row in zip(predicted, mine, strict=True)]
        cells += [f"{100 * median(map(abs, errors)):.1f}", f"{100 * worst(errors):+.1f}"]
        if prefix is not None:
            inside = sum(row[f"{prefix}low_s"] <= row["step_s"] <= row[f"{prefix}high_s"] for row in mine)
            cells.append(f"{inside} of {len(mine)}")
    return cells


def _by_machine(found: dict[str, list[dict[str, Any]]]) -> str:
    every = list(itertools.chain.from_iterable(found.values()))
    lines = []
    for title, mine in {**found, "all": every}.items():
        cells = [title, str(len(mine))]
        for column in ("predicted_s", "calibrated_s"):
            errors = [row[column] / row["step_s"] - 1 for row in mine]
            cells += [f"{100 * median(map(abs, errors)):.1f}", f"{100 * worst(errors):+.1f}"]
        inside = sum(row["low_s"] <= row["step_s"] <= row["high_s"] for row in mine)
        lines.append([*cells, f"{inside} of {len(mine)}"])
    heads = ["machine", "steps", "catalog's host: median, %", "worst, %", "its own host: median, %",
             "worst, %", "within the bounds"]  # fmt: skip
    return markdown_grid(heads, lines)


def kendall_tau(keep: Callable[[Step], bool] = lambda one: one.is_held_out) -> tuple[float, int]:
    """Return Kendall's tau over the pairs of recipes of one model, and the number of pairs.

    Args:
        keep: says which steps count.
    """
    signs = [
        1 if (one.predicted_s - other.predicted_s) * (one.measured_s - other.measured_s) > 0 else -1
        for mine in _by_model(filter(keep, steps()))
        for one, other in itertools.combinations(mine, 2)
    ]
    return (sum(signs) / len(signs) if signs else 0.0), len(signs)


def _by_model(some: Iterable[Step]) -> Iterable[list[Step]]:
    found: dict[str, list[Step]] = {}
    for one in some:
        model = one.recipe.model
        found.setdefault(f"{model.config} {model.implementation}", []).append(one)
    return found.values()
