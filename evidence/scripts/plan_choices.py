"""Does ``plan`` choose the fastest recipe? Its choices and recipes drawn at random, predicted.

    python -m evidence.scripts.plan_choices evidence/records/plan-choices [--jobs N] [--only MODEL]

Writes ``choices.jsonl``, a line for each model and memory limit: the ids of the recipes that
``trainfit.plan`` found, the best first; and ``predicted-MODEL-TUNE.jsonl``, records of these and of recipes
drawn by a seed from the same space. Goals of ``FREE`` have batches of any size and may change the numerics,
those of ``SEVERAL`` two GPUs, those of ``ONE_H100`` an H100; all others one H200.
Rows that such a file has stay; choices of today's planner are added, and recipes near the first choice of
each limit, until as many as ``NUM_WITHIN`` are predicted within it. ``python -m evidence.scripts.several_gpus
measure`` measures a file in its order: first choices, then the rest.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import trainfit
from evidence.scripts.several_gpus import predicted, without_gpu
from trainfit.api.plans import Tune
from trainfit.planning.search.candidate import MARGIN
from trainfit.planning.search.space import Option, changed, space, value_in
from trainfit.records import load
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.printable import say
from trainfit.spec.provenance import commit, to_line
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Record
from trainfit.spec.units import GIB

GPU, SEED = "h200", 15


class Goal(NamedTuple):
    """A model and how it is trained."""

    model: str
    seq: int
    tokens_per_step: int | None
    """None: batches of any size, and options that change the numerics, as ``plan`` does by itself."""
    tune: Tune
    caps_gib: tuple[int, ...] = (24, 48, 139)
    count: int = 1
    """GPUs."""
    gpu: str = GPU

    @property
    def name(self) -> str:
        """Model, kind of training, how many GPUs if several, and which if other ones."""
        several = f"-{self.count}-gpus" if self.count > 1 else ""
        other = f"-{self.gpu}" if self.gpu != GPU else ""
        return f"{self.model}-{self.tune if self.keep_quality else 'free'}{several}{other}"

    @property
    def keep_quality(self) -> bool:
        """Whether the numerics stay."""
        return self.tokens_per_step is not None

    @property
    def num_within(self) -> int:
        """Recipes measured within each limit."""
        return NUM_WITHIN if self.keep_quality else FREE_WITHIN

    @property
    def is_drawn_from_all(self) -> bool:
        """Whether recipes are drawn of the whole space at first, not only near first choices."""
        return self.keep_quality and self.count == 1

    def is_of(self, line: dict[str, Any]) -> bool:
        """Return whether a line of ``choices.jsonl`` is of this goal."""
        names = ("model", "seq", "tokens_per_step", "tune")
        several, kind = line.get("count", 1), line.get("gpu", GPU)
        is_equal = all(line[name] == getattr(self, name) for name in names)
        return is_equal and (several, kind) == (self.count, self.gpu)


GOALS = (
    Goal("qwen2.5-0.5b", 2048, 16384, "full"),
    Goal("llama-3.2-1b", 2048, 16384, "full"),
    Goal("gemma-2b", 2048, 16384, "full"),
    Goal("pythia-2.8b", 2048, 16384, "full"),
    Goal("mistral-7b-v0.1", 4096, 8192, "lora"),
    Goal("qwen3-14b", 4096, 8192, "lora", (48, 139)),
    Goal("qwen3-14b", 4096, 8192, "qlora", (24,)),
)
"""Six families, 0.5B to 14B. The large ones train an adapter, so that some recipe fits."""
FREE = (
    Goal("qwen2.5-0.5b", 1024, None, "full"),
    Goal("llama-3.2-1b", 1024, None, "full"),
    Goal("gemma-2-2b", 1024, None, "full"),
    Goal("qwen3-4b", 2048, None, "full", (48, 139)),
    Goal("llama-3.1-8b", 2048, None, "full", (80, 139)),
)
SEVERAL = (
    Goal("llama-3.2-1b", 2048, 32768, "full", (24, 139), count=2),
    Goal("qwen3-4b", 2048, 32768, "full", (48, 139), count=2),
    Goal("llama-3.1-8b", 2048, 32768, "full", (80, 139), count=2),
)
ONE_H100 = (
    Goal("llama-3.2-1b", 2048, None, "full", (79,), gpu="h100-sxm"),
    Goal("qwen3-4b", 2048, None, "full", (79,), gpu="h100-sxm"),
    Goal("llama-3.1-8b", 2048, None, "full", (79,), gpu="h100-sxm"),
)
EVERY = (*GOALS, *FREE, *SEVERAL, *ONE_H100)
NUM_DRAWN = 64
"""Recipes drawn for a model."""
NUM_WITHIN, DRAWS_EACH = 30, 12
"""Recipes of a file within each limit, and recipes drawn for each that is missing."""
FREE_WITHIN, FEW_DRAWS_EACH = 8, 1.4
"""Recipes within each limit of goals of ``FREE``, and recipes drawn for each where all are near a choice."""
MOST_CHANGED = 3
"""Families of options in which a recipe differs from the first choice that it is near to."""
FASTEST, OTHERS = 9, 4
"""Of the drawn recipes within a limit: those predicted fastest, and others, that are measured."""
MICROS = (1, 2, 4, 8, 16)
FACTORS = (0.5, 0.75, 1.25, 1.5, 2)
"""Micro-batches of free ones, as multiples of the first choice's."""
RECOMPUTE = ("none", "full", "selective", {"every": 2}, {"every": 3})
FOUND = 3
"""Recipes of a plan that are measured."""


def start(goal: Goal) -> Recipe:
    """Return the recipe that is planned from."""
    data: dict[str, Any] = {
        "model": {"config": goal.model}, "batch": {"micro": 1, "seq": goal.seq},
        "hardware": {"gpu": goal.gpu, "count": goal.count},
    }  # fmt: skip
    if goal.tune != "full":
        data["adapter"] = {"kind": "lora"}
    if goal.tune == "qlora":
        data["quantize"] = "nf4"
    return recipe_from(data)


def planned(goal: Goal, cap_gib: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the line of a plan, and the contents of the recipes found."""
    plan = trainfit.plan(
        goal.model, gpu=goal.gpu, count=goal.count, seq=goal.seq, tokens_per_step=goal.tokens_per_step,
        tune=goal.tune, memory_gib=cap_gib, keep_quality=goal.keep_quality, processes=0,
    )  # fmt: skip
    recipes = [one.as_recipe() for one in plan.found]
    line = {
        "model": goal.model, "seq": goal.seq, "tokens_per_step": goal.tokens_per_step, "tune": goal.tune,
        "count": goal.count, "gpu": goal.gpu, "memory_gib": cap_gib, "commit": commit(),
        "found": [recipe.id for recipe in recipes],
        "least_bytes": plan.least.estimate.highest.device if plan.least else None,
    }  # fmt: skip
    return line, [recipe.content() for recipe in recipes]


def drawn(goal: Goal) -> Iterator[Recipe]:
    """Yield different recipes of the planner's space, by the seed."""
    recipe, chance = start(goal), random.Random(f"{SEED} {goal.name}")
    families = _families(recipe, goal)

    def values() -> Iterator[dict[str, Any]]:
        for _ in range(50 * NUM_DRAWN):
            found: dict[str, Any] = {}
            for options in families.values():
                option = chance.choice(options)
                if chance.random() < (0.25 if option.is_slow else 0.4):
                    found |= dict(option.values)
            yield found | _batch(goal, chance, 1) | {"recompute": chance.choice(RECOMPUTE)}

    yield from itertools.islice(_different(recipe, values()), NUM_DRAWN)


def near(goal: Goal, choice: Recipe, cap_gib: int) -> Iterator[Recipe]:
    """Yield different recipes that differ from a first choice in a few families, batch or recomputation."""
    recipe, chance = start(goal), random.Random(f"{SEED} {goal.name} near {cap_gib}")
    families = _families(recipe, goal)

    def values() -> Iterator[dict[str, Any]]:
        for _ in range(50 * NUM_DRAWN):
            found: dict[str, Any] = {}
            for family in chance.sample(list(families), chance.randint(0, min(MOST_CHANGED, len(families)))):
                options = families[family]
                option = chance.choice([None, *options])
                # None: as the recipe that is planned from.
                found |= {key: value_in(recipe, key) for one in options for key, _ in one.values}
                found |= dict(option.values) if option else {}
            if chance.random() < 0.5:
                found |= _batch(goal, chance, choice.batch.micro)
            if chance.random() < 0.5:
                found["recompute"] = chance.choice(RECOMPUTE)
            yield found

    yield from (one for one in _different(choice, values()) if one.id != choice.id)


def other_strategies(choice: Recipe) -> Iterator[Recipe]:
    """Yield a first choice of several GPUs with whole weights on each, at several micro-batches."""
    whole = {"parallel.reshard_after_forward": True, "parallel.sync_each_batch": None}
    micro, count = choice.batch.micro, choice.batch.accumulate
    half = max(1, micro // 2)
    batches = {(micro, count), (2 * micro, max(1, count // 2)), (half, micro * count // half)}

    def values() -> Iterator[dict[str, Any]]:
        for strategy in ("ddp", "zero1"):
            for one, several in sorted(batches):
                if one * several == micro * count:
                    batch = {"batch.micro": one, "batch.accumulate": several}
                    yield {**whole, **batch, "parallel.strategy": strategy, "recompute": "none"}

    yield from _different(choice, values())


def _families(recipe: Recipe, goal: Goal) -> dict[str, list[Option]]:
    families: dict[str, list[Option]] = {}
    for option in space(recipe, keep_quality=goal.keep_quality).options:
        families.setdefault(option.family, []).append(option)
    return families


def _batch(goal: Goal, chance: random.Random, near_micro: int) -> dict[str, Any]:
    if goal.tokens_per_step is None:
        return {"batch.micro": max(1, round(near_micro * chance.choice(FACTORS)))}
    most = goal.tokens_per_step // goal.seq // goal.count
    micro = chance.choice([size for size in MICROS if size <= most])
    return {"batch.micro": micro, "batch.accumulate": most // micro}


def _different(recipe: Recipe, values: Iterator[dict[str, Any]]) -> Iterator[Recipe]:
    """Yield the recipe with each set of values, without those that are refused or were yielded before."""
    seen: set[str] = set()
    for each in values:
        with suppress(InputError):
            one = changed(recipe, each)
            if one.id not in seen:
                seen.add(one.id)
                yield one


def prediction(content: dict[str, Any]) -> Record | None:
    """Return the record of a recipe's prediction; None if it is refused."""
    try:
        return predicted(recipe_from(content))
    except InputError as error:
        say(f"refused: {error}", err=True)
        return None


def chosen(goal: Goal, lines: list[dict[str, Any]], records: dict[str, Record], ids: list[str]) -> list[str]:
    """Return ids of the recipes to measure: first choices, other recipes found, then drawn ones by limit."""
    wanted = [line["found"][0] for line in lines if line["found"]]
    wanted += [one for line in lines for one in line["found"][1:FOUND]]
    chance = random.Random(f"{SEED} {goal.name} measured")
    rest: list[list[str]] = []
    for cap in goal.caps_gib:
        within = [one for one in ids if one in records and _bytes(records[one]) <= cap * GIB * (1 - MARGIN)]
        within.sort(key=lambda one: -_speed(records[one]))
        others = within[FASTEST:]
        rest.append(within[:FASTEST] + chance.sample(others, min(OTHERS, len(others))))
    for place in range(FASTEST + OTHERS):
        wanted += [some[place] for some in rest if place < len(some)]
    return [one for one in dict.fromkeys(wanted) if one in records]


def _bytes(record: Record) -> int:
    assert record.estimate is not None
    return record.estimate.highest.device


def _speed(record: Record) -> float:
    assert record.estimate is not None
    return record.estimate.tokens_per_s or 0.0


def write(folder: Path, goals: list[Goal], jobs: int) -> None:
    """Plan, draw, predict and write the files of ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=without_gpu) as pool:
        plans = {goal: [pool.submit(planned, goal, cap) for cap in goal.caps_gib] for goal in goals}
        for goal in goals:
            path = folder / f"predicted-{goal.name}.jsonl"
            kept = {one.recipe_id: one for one in load(path)} if path.is_file() else {}
            found: list[dict[str, Any]] = []
            recipes: dict[str, Recipe] = {}
            for cap, future in zip(goal.caps_gib, plans[goal], strict=True):
                try:
                    line, contents = future.result()
                except InputError as error:
                    sys.exit(f"{goal.model}, {cap} GiB: {error}")
                found.append(line)
                recipes |= {
                    name: recipe_from(each) for name, each in zip(line["found"], contents, strict=True)
                }
                say(f"{goal.name}, {cap} GiB: {len(line['found'])} found")
            draws = _draws(goal, found, recipes, kept)
            asked = {one.id: one for one in (*recipes.values(), *draws) if one.id not in kept}
            results = pool.map(prediction, [one.content() for one in asked.values()])
            records = kept | {one: record for one, record in zip(asked, results, strict=True) if record}
            ids = [one.id for one in draws]
            rows = [records[one] for one in _wanted(goal, found, records, ids, set(kept))]
            text = "".join(to_line(row) + "\n" for row in rows)
            path.write_text(text, encoding="utf-8")
            _write_choices(folder / "choices.jsonl", goal, found)
            say(f"{goal.name}: {len(rows)} recipes to measure")


def _write_choices(path: Path, goal: Goal, found: list[dict[str, Any]]) -> None:
    """Write the lines of a goal's plans, in place of those that the file has of it."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    others = [json.loads(line) for line in text.splitlines()]
    lines = [one for one in others if not goal.is_of(one)] + found
    lines.sort(key=lambda line: [each.is_of(line) for each in EVERY].index(True))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _draws(
    goal: Goal, lines: list[dict[str, Any]], recipes: dict[str, Recipe], kept: dict[str, Record]
) -> list[Recipe]:
    """Return the recipes to draw: of the whole space at first, later near first choices."""
    if not kept and goal.is_drawn_from_all:
        return list(drawn(goal))
    draws: dict[str, Recipe] = {}
    each = DRAWS_EACH if goal.is_drawn_from_all else FEW_DRAWS_EACH
    for line in lines:
        missing = goal.num_within - len(_within(line["memory_gib"], kept.values()))
        if missing > 0 and line["found"]:
            some = near(goal, recipes[line["found"][0]], line["memory_gib"])
            new = (one for one in some if one.id not in kept)
            draws |= {one.id: one for one in itertools.islice(new, round(each * missing))}
        if goal.count > 1 and line["found"]:
            others = other_strategies(recipes[line["found"][0]])
            draws |= {one.id: one for one in others if one.id not in kept}
    return list(draws.values())


def _wanted(
    goal: Goal, lines: list[dict[str, Any]], records: dict[str, Record], ids: list[str], kept: set[str]
) -> list[str]:
    """Return ids of a file's rows, in order; ``kept``: those that it had before."""
    if not kept and goal.is_drawn_from_all:
        return chosen(goal, lines, records, ids)
    first = [one for line in lines for one in line["found"][:1]]
    rest = [one for line in lines for one in line["found"][1:FOUND]]
    before = [one for one in records if one in kept and one not in {*ids, *first, *rest}]
    wanted = [*first, *rest, *before]
    for cap in goal.caps_gib:
        missing = goal.num_within - len(
            _within(cap, (records[one] for one in dict.fromkeys(wanted) if one in records))
        )
        new = _within(cap, (records[one] for one in ids if one in records and one not in wanted))
        if goal.count > 1:  # Those within a small limit may be enough: the fastest of each are rivals.
            new.sort(key=lambda one: -_speed(records[one]))
            missing = max(missing, FASTEST)
        wanted[len(first) + len(rest) : len(first) + len(rest)] = new[: max(0, missing)]
    return [one for one in dict.fromkeys(wanted) if one in records]


def _within(cap_gib: int, records: Iterable[Record]) -> list[str]:
    """Return ids of the recipes within a limit, less the planner's margin."""
    return [one.recipe_id for one in records if _bytes(one) <= cap_gib * GIB * (1 - MARGIN)]


def main() -> None:
    """Write predictions of every goal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--only", help="one model, or one goal such as llama-3.2-1b-free")
    chosen_ = parser.parse_args()
    goals = [goal for goal in EVERY if chosen_.only in (None, goal.model, goal.name)]
    write(chosen_.folder, goals, chosen_.jobs)


if __name__ == "__main__":
    main()
