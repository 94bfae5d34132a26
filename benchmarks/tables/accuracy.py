"""Tables and figures of docs/results/accuracy.md."""

from __future__ import annotations

import itertools
import json
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median, quantiles

from benchmarks.tables.joined import RESULTS, errors, join, recipe_of, records, versions_of
from trainfit.catalog.load import model as find_model
from trainfit.report.compare import Comparison
from trainfit.report.plot import Panel, Series, draw
from trainfit.report.table import NOTHING, markdown_cell, markdown_grid
from trainfit.spec.held_out import is_held_out
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Estimate, Record
from trainfit.spec.units import MIB
from trainfit.techniques.registry import techniques as all_techniques

FIRST, ANEW = "as first committed", "predicted anew"
SUITE = "h200-*.jsonl"
FIRST_FILE = "first-predicted/h200.jsonl"
PEAKS = {
    "allocated": "peak_allocated_bytes",
    "reserved": "peak_reserved_bytes",
    "device": "peak_device_bytes",
}
PHASES = ("first.forward", "first.backward", "first.optimizer",
          "steady.forward", "steady.backward", "steady.optimizer")  # fmt: skip

Pairs = list[Comparison]


@cache
def suite() -> dict[str, Pairs]:
    """Return the suite's recipes that have a prediction and a measurement, with either prediction."""
    measured = [record for record in records(SUITE) if record.measurement is not None]
    anew = [one for one in join(records(SUITE)) if one.predicted is not None]
    first = [one for one in join([*records(FIRST_FILE), *measured]) if one.predicted is not None]
    return {FIRST: first, ANEW: anew}


def share(value: float, *, signed: bool = False) -> str:
    """Return a share in per cent; only what is 0 reads 0."""
    size = abs(value)
    if size == 0:
        return "0 %"
    if size < 1e-6:
        return "< 0.0001 %"
    sign = "-" if value < 0 else "+" if signed else ""
    return f"{sign}{size * 100:.{2 if size >= 1e-3 else 4}f} %"


def percentile_95(values: Sequence[float]) -> float:
    """Return the 95th percentile of the values' sizes."""
    return quantiles(map(abs, values), n=20, method="inclusive")[-1]


def worst(values: Iterable[float]) -> float:
    """Return the value of the largest size, with its sign."""
    return max(values, key=abs)


def exact(values: Sequence[float]) -> int:
    """Return how many are predicted to the byte."""
    return sum(value == 0 for value in values)


def time_ratios(pairs: Pairs) -> list[float]:
    """Return measured over predicted step times, in ascending order."""
    return sorted(ratio for one in pairs if (ratio := time_ratio(one)) is not None)


def time_ratio(one: Comparison) -> float | None:
    """Return the measured over the predicted step time, where both are known."""
    if one.predicted is None or one.measured is None or not one.on_its_device:
        return None
    expected, took = one.predicted.step_s, one.measured.step_s
    return took / expected if expected and took else None


def inside_bounds(pairs: Pairs) -> int:
    """Return how many measured step times lie within the bounds printed with the prediction."""
    return sum(
        bounds.low <= one.measured.step_s <= bounds.high
        for one in pairs
        if time_ratio(one) and one.predicted and one.measured and one.measured.step_s
        if (bounds := one.predicted.bounds.get("step_s"))
    )


def verdicts(pairs: Pairs) -> Counter[tuple[bool, str]]:
    """Return how many recipes there are of each (predicted to fit, status of the measurement)."""
    return Counter((one.predicted.fits, one.status) for one in pairs if one.predicted)


def headline() -> str:
    """Both predictions of the whole suite, by quantity."""
    rows: list[list[str]] = []

    def row(title: str, of: Callable[[Pairs], object]) -> None:
        rows.append([title, *(str(of(pairs)) for pairs in suite().values())])

    row("recipes that ran", lambda pairs: verdicts(pairs).total() - _out_of_memory(pairs))
    for name, field in PEAKS.items():
        row(f"{name} peak: recipes", lambda pairs, field=field: len(errors(pairs, field)))
        row("to the byte", lambda pairs, field=field: exact(errors(pairs, field)))
        row("median error", lambda pairs, field=field: share(median(map(abs, errors(pairs, field)))))
        row("95th percentile", lambda pairs, field=field: share(percentile_95(errors(pairs, field))))
        row("worst", lambda pairs, field=field: share(worst(errors(pairs, field)), signed=True))
    row("out of memory: recipes", _out_of_memory)
    row("predicted not to fit", lambda pairs: verdicts(pairs)[False, "out-of-memory"])
    row("ran, but predicted not to fit", lambda pairs: verdicts(pairs)[False, "done"])
    row("step time, measured / predicted: recipes", lambda pairs: len(time_ratios(pairs)))
    row("lowest", lambda pairs: f"{time_ratios(pairs)[0]:.2f}")
    row("median", lambda pairs: f"{median(time_ratios(pairs)):.2f}")
    row("highest", lambda pairs: f"{time_ratios(pairs)[-1]:.2f}")
    row("within the printed bounds", inside_bounds)
    return markdown_grid(["H200, torch 2.11.0, transformers 5.17.0", *suite()], rows)


def _out_of_memory(pairs: Pairs) -> int:
    return sum(one.status == "out-of-memory" for one in pairs)


def halves() -> str:
    """The half that rules were learned from and the held-out half, eager and compiled."""
    heads = ["half", "ran", f"to the byte, {FIRST}", "worst", f"to the byte, {ANEW}", "worst",
             "device: worst",
             "step time, measured / predicted"]  # fmt: skip
    rows = []
    for held_out in (False, True):
        for compiled in (False, True):
            first, anew = (
                [one for one in pairs if _is_in(one, held_out=held_out, compiled=compiled)]
                for pairs in suite().values()
            )
            ratios = time_ratios(anew)
            rows.append([
                f"{'held out' if held_out else 'learned from'}, {'compiled' if compiled else 'eager'}",
                str(len(errors(anew, PEAKS["allocated"]))), *_exact_and_worst(first), *_exact_and_worst(anew),
                share(worst(errors(anew, PEAKS["device"])), signed=True),
                f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
            ])  # fmt: skip
    return markdown_grid(heads, rows)


def _is_in(one: Comparison, *, held_out: bool, compiled: bool) -> bool:
    return is_held_out(one.recipe.id) == held_out and (one.recipe.compile is not False) == compiled


def _exact_and_worst(pairs: Pairs, name: str = "allocated") -> tuple[str, str]:
    found = errors(pairs, PEAKS[name])
    return (str(exact(found)), share(worst(found), signed=True)) if found else (NOTHING, NOTHING)


def origin(tags: Iterable[str]) -> str:
    """Return how a recipe came about, by the tags of its records.

    The draws over all fields are tagged ``h200`` and ``truth``, those around one technique ``h200-techniques``, or
    ``truth`` alone.
    """
    if "near-card" in tags:
        return "drawn by a seed, near the card's size"
    if "truth" in tags and "h200" in tags:
        return "drawn by a seed, all fields"
    return "drawn by a seed, around one technique" if {"truth", "h200-techniques"} & {*tags} else "chosen"


@cache
def origins_by_id() -> dict[str, str]:
    """Return recipe id -> how the recipe came about."""
    tags: dict[str, set[str]] = {}
    for record in records(SUITE):
        tags.setdefault(record.recipe_id, set()).update(record.tags)
    return {recipe_id: origin(found) for recipe_id, found in tags.items()}


def origins() -> str:
    """Recipes drawn by a seed, and chosen ones."""
    rows = []
    for name in sorted(set(origins_by_id().values())):
        first, anew = (
            [one for one in pairs if origins_by_id()[one.recipe.id] == name] for pairs in suite().values()
        )
        ran = len(errors(anew, PEAKS["allocated"]))
        rows.append([name, str(ran), str(len(anew) - ran), *_exact_and_worst(first), *_exact_and_worst(anew)])
    heads = [
        "recipes",
        "ran",
        "out of memory",
        f"to the byte, {FIRST}",
        "worst",
        f"to the byte, {ANEW}",
        "worst",
    ]
    return markdown_grid(heads, rows)


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
def blind_groups() -> dict[str, list[Blind]]:
    """Return the recipes that were predicted before they were measured, by group."""
    first = records(FIRST_FILE)
    groups = {
        title: _blind(one for one in first if (one.commit or "").startswith(commits))
        for title, commits in BLIND.items()
    }
    groups |= {title: _blind(one for one in records(file) if one.estimate) for title, file in SWEEPS.items()}
    return {**groups, "two versions of transformers": _blind(records("versions/predicted.jsonl"))}


def _blind(predictions: Iterable[Record]) -> list[Blind]:
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


def blind() -> str:
    """Recipes predicted before they were measured, by group."""
    rows = [_blind_row(title, found) for title, found in blind_groups().items()]
    every = [one for found in blind_groups().values() for one in found]
    heads = [
        "recipes",
        "ran",
        "to the byte",
        "worst",
        "device: recipes",
        "worst",
        "out of memory",
        "predicted not to fit",
    ]
    return markdown_grid(heads, [*rows, _blind_row("all", every)])


def _blind_row(title: str, found: Sequence[Blind]) -> list[str]:
    allocated = [one.error for one in found if one.error is not None]
    device = [one.device_error for one in found if one.device_error is not None]
    out = [one for one in found if one.allocated_bytes is None]
    return [
        title, str(len(allocated)), str(exact(allocated)), share(worst(allocated), signed=True),
        str(len(device)),
        share(worst(device), signed=True) if device else NOTHING, str(len(out)),
        str(sum(not one.predicted.fits for one in out)),
    ]  # fmt: skip


def versions() -> str:
    """Predictions of one recipe under several versions, and the measurements under the same."""
    found = records("versions/predicted.jsonl")
    measured = {
        (record.recipe_id, versions_of(record)): record.measurement
        for record in (*records(SUITE), *records("versions/measured.jsonl"))
        if record.measurement is not None
    }
    rows = []
    for record in sorted(found, key=lambda one: (one.recipe_id, versions_of(one))):
        assert record.estimate is not None
        held = measured.get((record.recipe_id, versions_of(record)))
        peak = held.peak_allocated_bytes if held is not None else None
        rows.append([
            _describe(Comparison(recipe_of(record), None, None)), *versions_of(record),
            f"{record.estimate.peak_allocated_bytes:,}", f"{peak:,}" if peak else NOTHING,
        ])  # fmt: skip
    return markdown_grid(
        ["recipe", "torch", "transformers", "predicted, bytes", "measured, bytes"], rows, num_text=3
    )


def techniques() -> str:
    """The recipes that use each technique, alone or with others."""
    rows = []
    for name, technique in sorted(all_techniques().items()):
        mine = [one for one in suite()[ANEW] if technique.applies(one.recipe)]
        held = errors(mine, PEAKS["device"])
        if mine:
            rows.append([
                f"`{name}`", str(len(errors(mine, PEAKS["allocated"]))), *_exact_and_worst(mine),
                *_exact_and_worst(mine, "reserved"), str(len(held)),
                share(worst(held), signed=True) if held else NOTHING,
            ])  # fmt: skip
    heads = ["technique", "ran", "allocated: to the byte", "worst", "reserved: to the byte", "worst",
             "device: recipes", "worst"]  # fmt: skip
    return markdown_grid(heads, rows)


def families() -> str:
    """The recipes of each model family; trainfit's native decoder apart from transformers' models."""
    groups: dict[str, Pairs] = {}
    for one in suite()[ANEW]:
        groups.setdefault(_family(one.recipe), []).append(one)
    rows = [
        [name, str(len(errors(mine, PEAKS["allocated"]))), *_exact_and_worst(mine)]
        for name, mine in sorted(groups.items(), key=lambda item: item[0].lower())
    ]
    return markdown_grid(["family", "ran", "to the byte", "worst"], rows)


def _family(recipe: Recipe) -> str:
    config = recipe.model.config
    name = find_model(config).family if isinstance(config, str) else str(config.get("model_type", "unknown"))
    return f"{name} (native)" if recipe.model.implementation == "native" else name


def phases() -> str:
    """The peak of each phase, predicted anew."""
    rows = []
    for name in PHASES:
        found = errors(suite()[ANEW], f"phases.{name}")
        cells = [
            share(median(map(abs, found))),
            share(percentile_95(found)),
            share(worst(found), signed=True),
        ]
        rows.append([name.replace(".", " step, "), str(len(found)), str(exact(found)), *cells])
    return markdown_grid(["phase", "recipes", "to the byte", "median", "95th percentile", "worst"], rows)


def largest(of: str, count: str = "5") -> str:
    """The recipes of the largest errors of a peak, with the cause where it is known."""
    causes = _causes()
    found = [(error, one) for one in suite()[ANEW] if (error := one.error(PEAKS[of])) is not None]
    found.sort(key=lambda pair: (-abs(pair[0]), pair[1].recipe.id))
    rows = []
    for error, one in found[: int(count)]:
        off = getattr(one.predicted, PEAKS[of]) - getattr(one.measured, PEAKS[of])
        cause = causes.get(one.recipe.id, "unknown")
        rows.append([_describe(one), markdown_cell(cause), share(error, signed=True), f"{off / MIB:+.1f}"])
    return markdown_grid(["recipe", "cause", "error", "MiB"], rows, num_text=2)


def crashed() -> str:
    """Trials that ended without a result."""
    rows = [
        [_describe(one), f"`{one.recipe.id}`", markdown_cell(_causes().get(one.recipe.id, "unknown"))]
        for one in join(records(SUITE))
        if one.status in ("crashed", "timeout")
    ]
    return markdown_grid(["recipe", "id", "cause"], rows, num_text=3)


@cache
def _causes() -> dict[str, str]:
    return tomllib.loads((RESULTS / "causes.toml").read_text("utf-8"))["causes"]


def _describe(one: Comparison) -> str:
    return markdown_cell(f"{one.model}, {one.batch}, {one.technique}")


def lost_commits() -> tuple[str, ...]:
    """Return the commits that records name and this repository does not hold."""
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


def missing_commits() -> str:
    """Rows whose commit does not exist in this repository, by file."""
    rows = []
    for commit in lost_commits():
        for file, counts in commits_by_file().items():
            rows += [
                [f"`{commit[:7]}{commit[40:]}`", f"`results/{file}`", str(num)]
                for name, num in counts.items()
                if name == commit
            ]
    return markdown_grid(["commit", "file", "rows"], rows, num_text=2)


def errors_plot() -> str:
    """Sizes of the errors of the allocated and device peaks, with both predictions."""
    edges = [0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1.0]
    names = ["exact", "< 0.0001 %", "< 0.001 %", "< 0.01 %", "< 0.1 %", "< 1 %", "1 % and more"]
    panels = []
    for name in ("allocated", "device"):
        series = []
        for title, pairs in suite().items():
            sizes = [abs(error) for error in errors(pairs, PEAKS[name])]
            counts = [sum(size == 0 for size in sizes)]
            counts += [
                sum(low <= size < high and size > 0 for size in sizes)
                for low, high in itertools.pairwise(edges)
            ]
            series.append(Series(title, counts, x=names, kind="bar", text=[str(count) for count in counts]))
        title = f"{name} peak, {len(errors(suite()[ANEW], PEAKS[name]))} recipes"
        panels.append(
            Panel(series, title=title, is_horizontal=True, y_label="recipes", x_label="size of the error")
        )
    return draw(panels, "accuracy-errors")


def times_plot() -> str:
    """Measured over predicted step time, with both predictions."""
    panels = []
    for title, pairs in suite().items():
        series = []
        for label, is_compiled in (("eager", False), ("compiled", True)):
            mine = [
                one for one in pairs if time_ratio(one) and (one.recipe.compile is not False) == is_compiled
            ]
            x = [one.predicted.step_s for one in mine if one.predicted and one.predicted.step_s]
            series.append(Series(label, [time_ratio(one) for one in mine], x=x, kind="scatter", alpha=0.6))
        panels.append(Panel(
            series, title=title, x_label="predicted step time, s", y_label="measured / predicted", x_log=True,
            y_log=True, lines=[1.0],
        ))  # fmt: skip
    return draw(panels, "accuracy-times", share_y=True)
