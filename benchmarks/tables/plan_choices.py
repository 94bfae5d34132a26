"""Tables of docs/results/plan.md: what ``plan`` chose, measured beside recipes drawn from its space."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.plan_choices import FREE, GOALS, Goal
from benchmarks.tables.joined import RESULTS
from trainfit.records import load
from trainfit.report.table import NOTHING, markdown_grid
from trainfit.spec.result import Measurement
from trainfit.spec.units import GIB

FOLDER = RESULTS / "plan-choices"


class Choice(NamedTuple):
    """A plan's first choice and what was measured beside it."""

    goal: Goal
    cap_gib: int
    first: Measurement | None
    """None: nothing fits, or the first choice was not measured."""
    own: tuple[Measurement, ...]
    """Recipes of the model's plans that were measured."""
    fits: bool
    within: tuple[Measurement, ...]
    """Measured recipes within the limit."""

    @property
    def best(self) -> float:
        """Tokens a second of the fastest of them."""
        return max((one.tokens_per_s or 0.0 for one in self.within), default=0.0)

    @property
    def share(self) -> float | None:
        """Speed of the first choice over the fastest."""
        return (self.first.tokens_per_s or 0.0) / self.best if self.first and self.best else None


def measured(goal: Goal) -> dict[str, Measurement]:
    """Return the measurements of a goal's recipes by id."""
    path = FOLDER / f"measured-{goal.name}.jsonl"
    records = load(path) if path.is_file() else []
    return {one.recipe_id: one.measurement for one in records if one.measurement is not None}


def choices(goals: Sequence[Goal] = GOALS) -> list[Choice]:
    """Return each goal's and limit's choice."""
    lines: list[dict[str, Any]] = [
        json.loads(line) for line in (FOLDER / "choices.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    found: list[Choice] = []
    for goal in goals:
        # A model's recipes of other kinds of training are no rivals: an adapter is part of the goal.
        results = measured(goal)
        for line in lines:
            if goal.is_of(line):
                cap = line["memory_gib"]
                within = [
                    one for one in results.values() if one.status == "done" and _bytes(one) <= cap * GIB
                ]
                first = results.get(line["found"][0]) if line["found"] else None
                names = {one for each in lines if goal.is_of(each) for one in each["found"]}
                own = tuple(one for name, one in results.items() if name in names)
                found.append(Choice(goal, cap, first, own, bool(line["found"]), tuple(within)))
    return found


def _bytes(one: Measurement) -> int:
    return one.peak_device_bytes or one.peak_reserved_bytes or 0


def first_choices() -> str:
    """Return a row a model and kind of training: under each limit the speed, memory and share of the best."""
    return _first_choices(GOALS)


def free_choices() -> str:
    """Return the same of plans with batches of any size and options that change the numerics."""
    return _first_choices(FREE)


def _first_choices(goals: Sequence[Goal]) -> str:
    every = choices(goals)
    limits = sorted({one.cap_gib for one in every})
    rows: dict[str, dict[int, str]] = {}
    for one in every:
        cell = NOTHING if one.fits else "nothing fits"
        if one.first and one.first.tokens_per_s and one.share is not None:
            memory = _bytes(one.first) / GIB
            cell = f"{one.first.tokens_per_s:,.0f}; {memory:.1f}; {one.share:.1%} of {len(one.within)}"
        kind = one.goal.tune if one.goal.keep_quality else f"{one.goal.seq} tokens"
        rows.setdefault(f"{one.goal.model}, {kind}", {})[one.cap_gib] = cell
    cells = [[name, *(found.get(limit, NOTHING) for limit in limits)] for name, found in rows.items()]
    return markdown_grid(["model, training", *(f"{limit} GiB" for limit in limits)], cells)


def trainer_rows() -> list[dict[str, Any]]:
    """Return the runs of transformers' Trainer."""
    path = FOLDER / "trainer.jsonl"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return [json.loads(line) for line in text.splitlines()]


def against_trainer() -> str:
    """Return a row a model: the planned recipe's speed over the Trainer's, by its settings."""
    runs = trainer_rows()
    rows = []
    for one in choices():
        if one.cap_gib != max(one.goal.caps_gib) or one.goal.tune == "qlora" or one.first is None:
            continue
        ours = one.first.tokens_per_s or 0.0

        def factor(compiled: bool, liger: bool, goal: Goal = one.goal, ours: float = ours) -> str:
            some = [
                run for run in runs
                if run["model"] == goal.model and (run["compile"], run["liger"]) == (compiled, liger)
            ]  # fmt: skip
            best = max((run.get("tokens_per_s", 0.0) for run in some), default=0.0)
            if best:
                return f"{best:,.0f} ({ours / best:.2f})"
            return ", ".join(dict.fromkeys(run["status"] for run in some)) or NOTHING

        settings = [factor(*each) for each in ((False, False), (True, False), (False, True), (True, True))]
        rows.append([f"{one.goal.model}, {one.goal.tune}", f"{ours:,.0f}", *settings])
    titles = ["model, training", "planned, tokens/s", "Trainer", "compiled", "Liger", "compiled, Liger"]
    return markdown_grid(titles, rows, is_number=[False, *[True] * 5])
