"""Tables and figures of evidence/pages/accuracy.md."""

from __future__ import annotations

import itertools
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache

from evidence.scripts.accuracy.held_out import is_held_out
from evidence.scripts.tables.errors import exact, in_head, share, worst
from evidence.scripts.tables.joined import FIRST_FILE, RESULTS, SUITE, describe, errors, join, records
from trainfit.catalog.load import model as find_model
from trainfit.report.compare import Comparison
from trainfit.report.plot import Panel, Series, draw
from trainfit.report.table import NOTHING, markdown_grid
from trainfit.spec.recipe import Recipe
from trainfit.techniques.registry import techniques as all_techniques

FIRST, ANEW = "as first committed", "predicted anew"
PEAKS = {
    "allocated": "peak_allocated_bytes",
    "reserved": "peak_reserved_bytes",
    "device": "peak_device_bytes",
}
Pairs = list[Comparison]


@cache
def suite() -> dict[str, Pairs]:
    """Return the suite's recipes that have a prediction and a measurement, with either prediction."""
    measured = [record for record in records(SUITE) if record.measurement is not None]
    anew = [one for one in join(records(SUITE)) if one.predicted is not None]
    first = [one for one in join([*records(FIRST_FILE), *measured]) if one.predicted is not None]
    return {FIRST: first, ANEW: anew}


def verdicts(pairs: Pairs) -> Counter[tuple[bool, str]]:
    """Return how many recipes there are of each (predicted to fit, status of the measurement)."""
    return Counter((one.predicted.fits, one.status) for one in pairs if one.predicted)


def groups() -> str:
    """Return the recipes by how they were chosen, and by the half that rules were learned from."""
    tests: dict[str, Callable[[Comparison], bool]] = {
        name: lambda one, name=name: origins_by_id()[one.recipe.id] == name
        for name in sorted(set(origins_by_id().values()))
    }
    for half, is_out in (("learned from", False), ("held out", True)):
        for kind, compiled in (("eager", False), ("compiled", True)):
            tests[f"{half}, {kind}"] = lambda one, a=is_out, b=compiled: _is_in(one, held_out=a, compiled=b)
    rows = []
    for name, holds in tests.items():
        first, anew = (list(filter(holds, pairs)) for pairs in suite().values())
        number = str(len(errors(anew, PEAKS["allocated"])))
        rows.append([name, number, _exact_and_worst(first)[0], *_exact_and_worst(anew)])
    return markdown_grid(["recipes", "ran", f"to the byte, {FIRST}", ANEW, "worst, %"], rows)


def _is_in(one: Comparison, *, held_out: bool, compiled: bool) -> bool:
    return is_held_out(one.recipe.id) == held_out and (one.recipe.compile is not False) == compiled


def _exact_and_worst(pairs: Pairs, name: str = "allocated") -> tuple[str, str]:
    found = errors(pairs, PEAKS[name])
    return (str(exact(found)), in_head(share(worst(found), signed=True))) if found else (NOTHING, NOTHING)


def origin(tags: Iterable[str]) -> str:
    """Return how a recipe came about, by the tags of its records.

    The draws over all fields are tagged ``h200`` and ``truth``, those around one technique
    ``h200-techniques`` or ``truth`` alone.
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


def groups_plot() -> str:
    """Worst error and share of exact allocated peaks, by technique and by model family."""
    mine = suite()[ANEW]
    used = {
        name: [one for one in mine if technique.applies(one.recipe)]
        for name, technique in all_techniques().items()
    }
    by_family: dict[str, Pairs] = {}
    for one in mine:
        by_family.setdefault(_family(one.recipe), []).append(one)
    panels = [
        _worst_by_group(title, {name: some for name, some in sorted(groups.items(), key=_name) if some})
        for title, groups in (("techniques", used), ("model families", by_family))
    ]
    return draw(panels, "accuracy-groups")


def _name(item: tuple[str, Pairs]) -> str:
    return item[0].lower()


def _worst_by_group(title: str, groups: dict[str, Pairs]) -> Panel:
    found = [errors(pairs, PEAKS["allocated"]) for pairs in groups.values()]
    series = Series(
        "", [100 * abs(worst(some)) for some in found], x=[*groups], kind="bar",
        text=[f"{exact(some)} of {len(some)} exact" for some in found],
    )  # fmt: skip
    return Panel([series], title=title, is_horizontal=True, x_label="worst error of the allocated peak, %",
                 y_limits=(0.0, 0.12))  # fmt: skip


def _family(recipe: Recipe) -> str:
    config = recipe.model.config
    name = find_model(config).family if isinstance(config, str) else str(config.get("model_type", "unknown"))
    return f"{name} (native)" if recipe.model.implementation == "native" else name


def largest(count: str = "2") -> str:
    """Return the recipes of the largest errors of each kind of peak."""
    shown: dict[str, Comparison] = {}
    for field in PEAKS.values():
        found = [one for one in suite()[ANEW] if one.error(field) is not None]
        found.sort(key=lambda one: (-abs(one.error(field) or 0), one.recipe.id))
        shown |= {one.recipe.id: one for one in found[: int(count)]}
    rows = [
        [describe(one.recipe), *(_exact_and_worst([one], name)[1] for name in PEAKS)]
        for one in shown.values()
    ]  # fmt: skip
    return markdown_grid(["recipe", *(f"{name}, %" for name in PEAKS)], rows)


@cache
def _causes() -> dict[str, str]:
    return tomllib.loads((RESULTS / "causes.toml").read_text("utf-8"))["causes"]


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
