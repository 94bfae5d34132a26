"""Tables and figures of evidence/pages/techniques.md and docs/reference/techniques.md."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from evidence.scripts.tables import batch_size
from evidence.scripts.tables.joined import recipe_of, records, versions_of
from evidence.scripts.technique_suite import (
    COMBINED,
    NOT_MEASURED,
    REFERENCE,
    Data,
    alone,
    as_yaml,
    control,
    differences,
    in_a_recipe,
)
from trainfit.report.plot import Panel, Series, draw
from trainfit.report.table import NOTHING, markdown_grid
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.recipe_file import merge, recipe_from
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Measurement
from trainfit.spec.units import GIB
from trainfit.spec.value import canonical_json
from trainfit.techniques import registry

MEASURED = ("techniques/measured.jsonl", "h200-*.jsonl")
VERSIONS = ("2.11.0", "5.17.0")
TRAINED = ("ladder-llama-3.2-1b/records.jsonl", "technique-quality/records.jsonl")
STEPS = 100
"""Of training, after which perplexities are compared."""
MS = 1e-3
NEAREST, FARTHEST = 0.04, 1.0
"""Changes within and beyond which a technique is not drawn; beyond are fp32 and eager attention."""

REFERENCE_PAGE = Path(__file__).parents[3] / "docs" / "reference" / "techniques.md"


def titles() -> dict[str, str]:
    """Return techniques' headings by name, in the order of REFERENCE_PAGE, those without a heading last."""
    headings = re.findall(r"^### (.*)$", REFERENCE_PAGE.read_text("utf-8"), re.M)
    place = {heading: number for number, heading in enumerate(headings)}
    ordered = sorted(registry.in_order(), key=lambda one: place.get(one.title, len(place)))
    return {technique.name: technique.title for technique in ordered}


TITLES = titles()
ALL = registry.techniques()


@dataclass(frozen=True)
class Effect:
    """A technique's recipe and the same recipe without it, measured."""

    technique: str
    recipe: Recipe
    with_it: Measurement
    without: Measurement

    def change(self, field: str) -> float:
        """Return how much larger a field of the measurement is with the technique, a share."""
        return getattr(self.with_it, field) / getattr(self.without, field) - 1

    @property
    def perplexity(self) -> float | None:
        """Of held-out text after training, where the recipe was trained."""
        return perplexities().get(_key(self.recipe))


@cache
def _measurements() -> dict[str, Measurement]:
    """Return the newest finished measurement of each recipe, by recipe id."""
    found = [
        one for one in records(*MEASURED) if one.measurement is not None and versions_of(one) == VERSIONS
    ]
    found.sort(key=lambda one: one.created_at)
    return {
        one.recipe_id: one.measurement
        for one in found
        if one.measurement and one.measurement.status == "done"
    }


def reference() -> Measurement:
    """Return the measurement of the reference recipe."""
    return _measurements()[recipe_from(REFERENCE).id]


@cache
def effects() -> tuple[Effect, ...]:
    """Return each technique's measured effect, by variant."""
    found = []
    for technique in TITLES:
        for recipe in alone(technique) if technique not in NOT_MEASURED else ():
            without = control(technique, recipe)
            assert without is not None
            sides = (_measurements()[recipe.id], _measurements()[without.id])
            found.append(Effect(technique, recipe, *sides))
    return tuple(found)


@cache
def perplexities() -> dict[str, float]:
    """Return the perplexity after 100 steps of training, by the recipe without its seed and learning rate."""
    found = {}
    for file in TRAINED:
        for record in records(file):
            run = record.train
            if run is not None and run["status"] == "done" and run["steps"] == STEPS:
                found[_key(recipe_of(record))] = run["eval_perplexity"]
    return found


def _key(recipe: Recipe) -> str:
    content = recipe.content()
    del (
        content["seed"],
        content["optimizer"]["lr"],
        content["hardware"]["price_per_hour"],
        content["model"]["name"],
    )
    return canonical_json(content)


def measured() -> str:
    """Memory, step time and perplexity with each technique, against the same recipe without it."""
    rows = [["(reference)", *_cells(reference(), None, perplexities()[_key(recipe_from(REFERENCE))])]]
    for one in effects():
        own = as_yaml(differences(one.recipe, ALL[one.technique].fields))
        needed = as_yaml(ALL[one.technique].needs)
        cells = _cells(one.with_it, one, one.perplexity)
        recipe = f"`{own}`" + (f" over `{needed}`" if needed else "")
        rows.append([recipe, *cells])
    rows += batch_size.technique_rows()
    return markdown_grid(["technique", "allocated, GiB", "device, GiB", "step, ms", "perplexity"], rows)


def _cells(held: Measurement, effect: Effect | None, perplexity: float | None) -> list[str]:
    units = {"peak_allocated_bytes": (GIB, 2), "peak_device_bytes": (GIB, 2), "step_s": (MS, 1)}
    cells = []
    for field, (unit, digits) in units.items():
        size = f"{getattr(held, field) / unit:.{digits}f}"
        cells.append(size if effect is None else f"{effect.change(field) * 100:+z.1f}%")
    return [*cells, NOTHING if perplexity is None else f"{perplexity:,.2f}"]


def together() -> str:
    """Return the combinations on the Pareto frontier, of all and of those without adapters and fp8."""
    held = {
        recipe: _measurements()[recipe.id]
        for recipe in (recipe_from(merge(REFERENCE, fields)) for fields in COMBINED)
    }
    plain = [recipe for recipe in held if recipe.adapter is None and recipe.precision != "fp8"]
    shown = [
        one for one in held if _is_on_frontier(one, held, list(held)) or _is_on_frontier(one, held, plain)
    ]
    rows = [[f"`{as_yaml(differences(one))}`", *_cells(held[one], None, None)[:3]] for one in shown]
    rows.sort(key=lambda row: float(row[1]))
    return markdown_grid(["techniques", "allocated, GiB", "device, GiB", "step, ms"], rows)


def _is_on_frontier(one: Recipe, held: Mapping[Recipe, Measurement], group: Sequence[Recipe]) -> bool:
    """Return whether no other recipe of its group is both smaller and faster."""
    mine = held[one]
    return one in group and not any(
        (held[other].peak_allocated_bytes or 0) < (mine.peak_allocated_bytes or 0)
        and (held[other].step_s or 0) < (mine.step_s or 0)
        for other in group
    )


def tradeoff() -> str:
    """Change of device memory against change of step time, of the techniques that change either."""
    changes = [(one, one.change("peak_device_bytes"), one.change("step_s")) for one in effects()]
    shown = [row for row in changes if NEAREST < max(abs(row[1]), abs(row[2])) < FARTHEST]
    points = Series(
        "", [slower * 100 for _, _, slower in shown], x=[larger * 100 for _, larger, _ in shown],
        kind="scatter", text=[_label(one) for one, _, _ in shown],
    )  # fmt: skip
    panel = Panel(
        [points], x_label="change of peak device memory, %", y_label="change of step time, %", lines=[0.0]
    )
    return draw([panel], "techniques-tradeoff", size=(8.5, 6))


def _label(one: Effect) -> str:
    """Return the technique's heading, and the value of its recipe where it has several."""
    if len(ALL[one.technique].examples) == 1:
        return TITLES[one.technique]
    own = differences(one.recipe, ALL[one.technique].fields)
    return ", ".join(map(str, own.values()))


def combinations() -> str:
    """Return how a recipe turns on each technique, and with which earlier ones it is refused."""
    never, partly = refusals()
    rows = []
    for number, (name, title) in enumerate(TITLES.items()):
        refused = [
            TITLES[other] + "*" * (other in partly[name])
            for other in list(TITLES)[:number]
            if other in never[name] | partly[name]
        ]
        rows.append([f"[{title}](#{_anchor(title)})", in_a_recipe(name), ", ".join(refused)])
    return markdown_grid(["technique", "in a recipe", "refused with (*: some variants)"], rows, num_text=3)


def application_order() -> str:
    """Return the techniques in the order in which they are applied, with the fields that turn them on."""
    rows = [
        [
            str(one.order),
            f"[{one.title}](#{_anchor(one.title)})",
            ", ".join(f"`{name}`" for name in one.fields),
        ]
        for one in registry.in_order()
    ]
    return markdown_grid(["order", "technique", "fields"], rows, num_text=3)


def _anchor(title: str) -> str:
    return "".join(letter for letter in title.lower().replace(" ", "-") if letter.isalnum() or letter == "-")


@cache
def refusals() -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Return technique -> techniques with which every recipe, and with which some recipes, are refused."""
    never: dict[str, set[str]] = {name: set() for name in ALL}
    partly: dict[str, set[str]] = {name: set() for name in ALL}
    for first in ALL:
        for second in ALL:
            is_choice = ALL[first].fields == ALL[second].fields
            found = set(_refused(first, second)) if first < second and not is_choice else set()
            if True in found:
                kind = partly if False in found else never
                kind[first].add(second)
                kind[second].add(first)
    return never, partly


def _refused(first: str, second: str) -> Iterator[bool]:
    """Yield whether a recipe is refused, for each combination of the variants that stand alone."""
    for one in (*ALL[first].examples, *ALL[first].variants):
        for other in (*ALL[second].examples, *ALL[second].variants):
            alone_too = [
                merge(REFERENCE, _laid(name, data)) for name, data in ((first, one), (second, other))
            ]
            if not clash(one, other) and all(map(_is_allowed, alone_too)):
                yield not _is_allowed(merge(merge(alone_too[0], _laid(second, other)), one))


def _laid(technique: str, variant: Data) -> Data:
    """Return the variant with what it cannot be without."""
    needed = {} if _is_allowed(merge(REFERENCE, variant)) else ALL[technique].needs
    return merge(needed, variant)


def _is_allowed(data: Data) -> bool:
    return _check(json.dumps(data, sort_keys=True))


@cache
def _check(text: str) -> bool:
    try:
        registry.check(recipe_from(json.loads(text)))
    except InputError:
        return False
    return True


def clash(first: Data, second: Data) -> bool:
    """Return whether both write one field with different values, which makes them a choice."""
    for key in first.keys() & second.keys():
        one, other = first[key], second[key]
        both: Any = isinstance(one, dict) and isinstance(other, dict) and key not in ("recompute", "adapter")
        if clash(one, other) if both else one != other:
            return True
    return False
