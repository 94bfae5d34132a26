"""Find the importers, and recognise a file's tool.

Every module of ``tools`` with an ``IMPORTER`` is one. Installed packages add theirs by entry points of the
group ``trainfit.importers``, each naming an ``Importer``.
"""

import importlib
import pkgutil
from collections.abc import Iterable
from functools import cache
from importlib.metadata import entry_points

from trainfit.catalog.other_files import is_no_recipe
from trainfit.integrations.importers import tools
from trainfit.integrations.importers.base import Importer
from trainfit.integrations.importers.source import Source, read
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe

GROUP = "trainfit.importers"
LEAST_MARKS = 2  # Fields that make a wrong recipe another tool's file
MOST_SHOWN = 4  # Fields named as the reason for a tool


@cache
def importers() -> dict[str, Importer]:
    """Return every importer by its name.

    Raises:
        InputError: two have one name.
    """
    prefix = f"{tools.__name__}."
    modules = [importlib.import_module(one.name) for one in pkgutil.iter_modules(tools.__path__, prefix)]
    found = [one.IMPORTER for one in modules if hasattr(one, "IMPORTER")]
    found += [point.load() for point in sorted(entry_points(group=GROUP), key=lambda point: point.name)]
    named: dict[str, Importer] = {}
    for one in found:
        if one.name in named:
            raise InputError("two importers have this name", "rename one", field="IMPORTER", value=one.name)
        named[one.name] = one
    return named


def importer(name: str) -> Importer:
    """Return the importer of a tool.

    Raises:
        InputError: there is none.
    """
    known = {one.lower().replace("_", "-"): one for one in importers()}
    folded = name.lower().replace("_", "-")
    if folded not in known:
        remedy = f"use one of {', '.join(importers())}"
        raise InputError("no importer of that name", remedy, field="--tool", value=name)
    return importers()[known[folded]]


def recognised(source: Source) -> tuple[Importer, tuple[str, ...]]:
    """Return the importer of a file's tool, and the fields that decided.

    Raises:
        InputError: no tool's fields, or those of two tools alike.
    """
    found = _marks_in(source.names())
    if not found:
        raise InputError(*_why_not(source), file=source.path)
    most = max(len(marks) for marks in found.values())
    best = [name for name, marks in found.items() if len(marks) == most]
    if len(best) > 1:
        each = " and ".join(f"{name} ({', '.join(sorted(found[name])[:MOST_SHOWN])})" for name in best)
        raise InputError(f"has fields of {each}", f"name one with --tool {best[0]}", file=source.path)
    return importers()[best[0]], tuple(sorted(found[best[0]]))


def foreign_tool(path: str) -> str | None:
    """Return the title of the tool whose configuration a file is; None: of no tool, or of several alike."""
    try:
        found, marks = recognised(read(path))
    except (InputError, OSError):
        return None
    return found.title if len(marks) >= LEAST_MARKS or path.endswith(".py") else None


def _marks_in(names: Iterable[str]) -> dict[str, frozenset[str]]:
    """Return for each tool its marks among the names, without tools whose fields another one includes."""
    there = frozenset(names)
    found = {one.name: one.marks & there for one in importers().values() if one.marks & there}
    included = {name for one in found for name in importers()[one].includes}
    return {name: marks for name, marks in found.items() if name not in included}


def _why_not(source: Source) -> tuple[str, str]:
    if source.values.keys() & {"extends", "batch", "hardware", "model"} and source.values.keys() <= {
        "extends",
        *Recipe.model_fields,
    }:
        return "this is a recipe of trainfit, not another tool's file", f"trainfit predict {source.path}"
    if is_no_recipe(source.values):
        return "this is a model's config alone", f"trainfit predict {source.path}"
    known = ", ".join(importers())
    if source.path.endswith(".py"):
        return "no call that an importer knows", f"name the tool with --tool ({known}), or trace the script"
    return "no fields by which a tool is recognised", f"name it with --tool: {known}"
