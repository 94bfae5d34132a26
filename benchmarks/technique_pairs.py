"""What records say of a technique: recipes with it beside their controls, and the partners with which it does best.

Enters: Records of predict, measure and a sweep's train. Leaves: Pairs and Bests. Two recipes are a pair where one is the other's
control (``technique_suite.control``): they differ in the technique's own fields only, and stand on the GPU of their recipe.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.technique_suite import OPTIMIZER, asks, control, told
from trainfit.records import load
from trainfit.report.compare import Comparison
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Record
from trainfit.spec.value import canonical_json, parse
from trainfit.techniques import registry

Kind = Literal["predict", "measure", "train"]
KINDS = ("predict", "measure", "train")
OUT_OF_MEMORY = "out-of-memory"


@dataclass(frozen=True)
class Training:
    """What perplexities have to have in common to be compared."""

    steps: int
    train_tokens: int
    eval_tokens: int


@dataclass(frozen=True)
class Result:
    """One recipe, predicted or measured."""

    recipe: Recipe
    kind: Kind
    created_at: str
    peak_bytes: int | None
    """Highest allocated; None: it ran out of memory."""
    step_s: float | None
    perplexity: float | None = None
    """Of held-out text after training."""
    training: Training | None = None


@dataclass(frozen=True)
class Pair:
    """A technique's recipe and its control, the same way found out."""

    with_it: Result
    without: Result


class Book:
    """The newest result of each recipe and kind, found by what decides memory and speed."""

    def __init__(self, records: Iterable[Record]):
        self._found: dict[tuple[str, str], Result] = {}
        for record in records:
            for result in _results(record):
                place = (key(result.recipe), result.kind)
                if place not in self._found or result.created_at >= self._found[place].created_at:
                    self._found[place] = result

    def find(self, recipe: Recipe, kind: Kind) -> Result | None:
        """What is known of an equal recipe."""
        return self._found.get((key(recipe), kind))

    def all(self, *kinds: str) -> list[Result]:
        """Every result of these kinds, in an order that does not depend on the records'."""
        found = [result for result in self._found.values() if result.kind in kinds]
        return sorted(
            found, key=lambda result: (result.recipe.model.display_name, result.recipe.id, result.kind)
        )

    def pair(self, technique: str, recipe: Recipe, kind: Kind) -> Pair | None:
        """The recipe and its control, where both are known."""
        without = control(technique, recipe)
        found = self.find(recipe, kind), without and self.find(without, kind)
        return Pair(found[0], found[1]) if found[0] and found[1] else None

    def measured_pairs(self, technique: str) -> list[Pair]:
        """Every pair measured, or else trained."""
        pairs: dict[str, Pair] = {}
        for result in self.all("measure", "train"):
            if asks(technique, result.recipe) and (pair := self.pair(technique, result.recipe, result.kind)):
                pairs.setdefault(key(result.recipe), pair)  # "measure" comes before "train".
        return list(pairs.values())

    def trained_pairs(self, technique: str) -> list[Pair]:
        """Every pair that was trained alike to a perplexity; only another optimizer may have another learning rate."""
        pairs = []
        for result in self.all("train"):
            pair = self.pair(technique, result.recipe, "train") if asks(technique, result.recipe) else None
            if pair is None or result.perplexity is None or pair.without.perplexity is None:
                continue
            rates = {side.recipe.optimizer.lr for side in (pair.without, pair.with_it)}
            if pair.without.training == result.training and (
                len(rates) == 1 or registry.techniques()[technique].fields == OPTIMIZER
            ):
                pairs.append(pair)
        return pairs


@dataclass(frozen=True)
class Best:
    """Of the recipes of one model and batch that use a technique: the one of least memory and the fastest."""

    smallest: Result
    fastest: Result
    num_recipes: int


def best_of(technique: str, results: Sequence[Result]) -> Best | None:
    """None where no recipe with the technique has both figures."""
    mine = [one for one in results if one.peak_bytes and one.step_s and asks(technique, one.recipe)]
    if not mine:
        return None
    smallest = min(mine, key=lambda one: (one.peak_bytes or 0, one.step_s or 0.0, one.recipe.id))
    fastest = min(mine, key=lambda one: (one.step_s or 0.0, one.peak_bytes or 0, one.recipe.id))
    return Best(smallest, fastest, len(mine))


def group(recipe: Recipe) -> str:
    """Equal for recipes that may be compared: one GPU, one model, as many tokens a step, all weights trained or an adapter's."""
    model = recipe.model.model_dump(mode="json", exclude={"name"})
    batch, gpu = recipe.batch, recipe.hardware.gpu
    return canonical_json([model, batch.seq, batch.tokens, recipe.adapter is None, gpu])


def groups(results: Iterable[Result]) -> dict[str, list[Result]]:
    """Results by their recipes' group."""
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(group(result.recipe), []).append(result)
    return found


def key(recipe: Recipe) -> str:
    """Equal for recipes of equal memory and speed: without names, seed, price and learning rate."""
    content = recipe.content()
    del (
        content["seed"],
        content["hardware"]["price_per_hour"],
        content["model"]["name"],
        content["optimizer"]["lr"],
    )
    return canonical_json(content)


def read_results(folder: Path) -> list[Record]:
    """Every Record of ``folder``'s JSON Lines files and of those in its folders; files of other things are left out.

    Raises:
        InputError: a file of Records has a damaged line.
    """
    files = sorted((*folder.glob("*.jsonl"), *folder.glob("*/*.jsonl")))
    return [record for file in files if _holds_records(file) for record in load(file)]


def _holds_records(file: Path) -> bool:
    with file.open(encoding="utf-8") as lines:
        first = json.loads(next(lines, "{}"))
    return isinstance(first, dict) and first.get("kind") in KINDS


def _results(record: Record) -> Iterable[Result]:
    recipe = parse(Recipe, record.recipe, file=f"record of {record.created_at}")
    if record.estimate is not None:
        estimate = record.estimate
        yield Result(recipe, "predict", record.created_at, estimate.peak_allocated_bytes, estimate.step_s)
    measured = record.measurement
    if measured is not None and Comparison(recipe, None, measured).on_its_device:
        if measured.status == "done":
            yield Result(recipe, "measure", record.created_at, measured.peak_allocated_bytes, measured.step_s)
        elif measured.status == OUT_OF_MEMORY:
            yield Result(recipe, "measure", record.created_at, None, None)
    if record.train is not None and record.train["status"] == "done":
        yield from _trained(recipe, record.created_at, record.train)


def _trained(recipe: Recipe, created_at: str, run: dict[str, Any]) -> Iterable[Result]:
    start = run["run"]
    if (
        run["peak_memory_is"] == "cuda-allocated"
        and recipe.hardware.gpu.split("-")[0] in start["device"].lower()
    ):
        yield Result(
            recipe, "train", created_at, run["peak_memory_bytes"], run["step_s"], run["eval_perplexity"],
            Training(run["steps"], start["train_tokens"], start["eval_tokens"]),
        )  # fmt: skip


def others(recipe: Recipe, fields: Sequence[str]) -> dict[str, Any]:
    """What the recipe asks for besides ``fields``."""
    own = told(recipe, fields)
    return {name: value for name, value in told(recipe).items() if name not in own}
