"""Tables of evidence/pages/plan.md: what ``plan`` chose, measured beside recipes drawn from its space."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from evidence.scripts.plan_choices import FREE, GOALS, ONE_H100, SEVERAL, Goal
from evidence.scripts.tables.joined import RESULTS
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


@cache
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


def choices_of_several_gpus() -> str:
    """Return the same of plans for two GPUs."""
    return _first_choices(SEVERAL)


def choices_of_an_h100() -> str:
    """Return the same of plans for one H100, with batches of any size."""
    return _first_choices(ONE_H100)


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


def trainer_rows(name: str = "trainer.jsonl") -> list[dict[str, Any]]:
    """Return the runs of transformers' Trainer."""
    path = FOLDER / name
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return [json.loads(line) for line in text.splitlines()]


def against_trainer() -> str:
    """Return a row a model: the planned recipe's speed over the Trainer's, by its settings."""
    names = ["compile", "liger"]
    settings = {
        "Trainer": (False, False), "compiled": (True, False), "Liger": (False, True),
        "compiled, Liger": (True, True),
    }  # fmt: skip
    return _against_trainer(GOALS, "trainer.jsonl", names, settings)


def against_trainer_on_several_gpus() -> str:
    """Return the same on two GPUs."""
    names = ["strategy", "pure", "compile", "liger"]
    settings = {
        "FSDP2": ("fsdp2", False, False, False), "FSDP2, Liger": ("fsdp2", False, False, True),
        "FSDP2, compiled": ("fsdp2", False, True, False), "FSDP2, all in bf16": ("fsdp2", True, False, False),
        "the same, Liger": ("fsdp2", True, False, True), "DDP": ("ddp", False, False, False),
        "DDP, Liger": ("ddp", False, False, True),
    }  # fmt: skip
    return _against_trainer(SEVERAL, "trainer-several-gpus.jsonl", names, settings)


def _against_trainer(
    goals: Sequence[Goal], file: str, names: Sequence[str], settings: Mapping[str, tuple[Any, ...]]
) -> str:
    runs, rows = trainer_rows(file), list[list[str]]()
    for one in choices(goals):
        if one.cap_gib != max(one.goal.caps_gib) or one.goal.tune == "qlora" or one.first is None:
            continue
        ours = one.first.tokens_per_s or 0.0
        cells: list[str] = []
        for setting in settings.values():
            wanted = {"model": one.goal.model, **dict(zip(names, setting, strict=True))}
            some = [run for run in runs if wanted.items() <= run.items()]
            best = max((run.get("tokens_per_s", 0.0) for run in some), default=0.0)
            ended = ", ".join(dict.fromkeys(run["status"] for run in some)) or NOTHING
            cells.append(f"{best:,.0f} ({ours / best:.2f})" if best else ended)
        rows.append([f"{one.goal.model}, {one.goal.tune}", f"{ours:,.0f}", *cells])
    titles = ["model, training", "planned, tokens/s", *settings]
    return markdown_grid(titles, rows, is_number=[False, *[True] * (len(titles) - 1)])
