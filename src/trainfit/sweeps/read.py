"""Read a sweep's file into variants, each a whole Recipe, before anything runs.

Paths in a file are relative to it. Any mistake is one InputError that names the file, the variant, the field,
the value and the remedy.
"""

import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainfit.catalog import load as catalog
from trainfit.catalog.config_notes import config_notes
from trainfit.catalog.names import find_model
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.parse import parse
from trainfit.spec.parsing.plain_data import read_yaml
from trainfit.spec.parsing.recipe_file import (
    merge,
    read_data,
    recipe_from,
    recipe_lines,
    set_field,
    with_data_paths,
    with_model_config,
)
from trainfit.spec.parsing.synonyms import written_out
from trainfit.spec.recipe import Recipe
from trainfit.spec.sweep import FOLDER_NAME, SweepFile, TrainPart, Variant
from trainfit.training.options import SYNTHETIC, TrainOptions, data_from, is_there, train_options

MAX_VARIANTS = 1000  # Of a file that varies recipes
MAX_RECIPES = 100_000  # Of a list of recipes
MAX_NAME = 100
LINES = ".jsonl"
RECIPE_SUFFIXES = (".yaml", ".yml", ".json")

Data = dict[str, Any]
Start = tuple[str, Data, str]  # A variant's name, its recipe as plain data, and the place of its definition


@dataclass(frozen=True)
class Sweep:
    """A sweep to run. ``notes``: lines for the user, such as equal variants."""

    name: str
    file: SweepFile
    variants: tuple[Variant, ...]
    notes: tuple[str, ...]


def read_sweep(*paths: Path, settings: list[str] | None = None) -> Sweep:
    """Read a sweep's file, or a list of recipes: recipe files, and JSON Lines files (.jsonl) of recipes.

    Args:
        settings: ``a.b=c``, laid on every variant.

    Raises:
        InputError: bad content, here or in a recipe it names, or a sweep's file among several.
        OSError: a file cannot be read.
    """
    starts: list[Start] = []
    for path in paths:
        data = None if path.suffix == LINES else read_yaml(path)
        if isinstance(data, dict) and not {"model", "extends"} & data.keys():
            if len(paths) > 1:
                remedy = "run it alone; several files are recipes, or .jsonl files of recipes"
                raise InputError("not a recipe", remedy, file=str(path))
            return _sweep(*_read_file(path, data), path, settings)
        starts += _recipes_in(path)
    if not starts:
        raise InputError("no recipes", "write one a line", file=str(paths[0]))
    name = paths[0].stem if len(paths) == 1 and FOLDER_NAME.fullmatch(paths[0].stem) else "recipes"
    return _sweep(name, SweepFile(recipes=tuple(map(str, paths))), starts, paths[0], settings)


def _read_file(path: Path, data: Data) -> tuple[str, SweepFile, list[Start]]:
    """Return name, content and variants of a sweep's file."""
    for part in ("measure", "train"):
        if part in data and data[part] is None:  # Else it would be taken for "do not".
            remedy = f"write {part}: {{}} for the defaults, or leave it out"
            raise InputError("nothing is written", remedy, field=part, file=str(path))
    file = parse(SweepFile, data, file=str(path))
    if file.train is not None:
        file = file.model_copy(update={"train": _checked(file.train, path)})
    if file.name is None and not FOLDER_NAME.fullmatch(path.stem):
        problem = "the file's name is no name for a folder"
        raise InputError(problem, "write name: NAME in it", file=str(path))
    starts = [*_from_base(file, path), *_from_recipes(file, path)]
    starts = [varied for start in starts for varied in _product(start, file, path)]
    return file.name or path.stem, file, starts


def _sweep(name: str, file: SweepFile, starts: list[Start], path: Path, settings: list[str] | None) -> Sweep:
    most = MAX_VARIANTS if file.product or file.list else MAX_RECIPES
    if len(starts) > most:
        field = "product" if file.product else "list" if file.list else "recipes"
        problem, remedy = f"{len(starts):,} variants", f"at most {most:,} are run"
        raise InputError(problem, remedy, field=field, file=str(path))
    names: set[str] = set()
    for called, _, where in starts:
        if called in names:
            problem = f"two variants are called {called!r}"
            raise InputError(problem, "give each its own name", file=where or str(path))
        names.add(called)
    notes: list[str] = []
    equals: list[str] = []
    variants: dict[str, Variant] = {}
    for start in starts:
        variant = _variant(start, settings or [], notes)
        if file.train is not None:
            _check_data(file.train, variant.recipe, start[2])
        first = variants.setdefault(variant.recipe.id, variant)
        if first is not variant:
            equals.append(f"{variant.name} is the same recipe as {first.name}: it is run once")
    return Sweep(name, file, tuple(variants.values()), (*dict.fromkeys(notes), *equals))


def training_of(part: TrainPart, recipe: Recipe) -> TrainPart:
    """Return a sweep's training of one recipe: what the sweep leaves open is the recipe's own."""
    section = recipe.data
    own = {"data": section.train or SYNTHETIC, "eval_fraction": section.eval_share or None}
    return part.model_copy(update={name: value for name, value in own.items() if getattr(part, name) is None})


def options_of(part: TrainPart, recipe: Recipe, **fields: Any) -> TrainOptions:
    """Return the options of a training run that leaves only numbers: no checkpoint, no event files."""
    given = part.model_dump(mode="json", exclude={"data"})
    plain = {"save_last": False, "tensorboard": False}
    return train_options(part.data, recipe.data, weights=recipe.model.weights, **given, **plain, **fields)


def _checked(part: TrainPart, path: Path) -> TrainPart:
    """Return ``part`` with its data's path made absolute; refuse what a run would refuse."""
    if part.data is not None and "\0" not in part.data and is_there(path.parent / part.data):
        part = part.model_copy(update={"data": str((path.parent / part.data).resolve())})
    try:
        plain = {"data": part.data and data_from(part.data).model_dump(), "out": "nowhere"}
        parse(
            TrainOptions, {k: v for k, v in (part.model_dump(mode="json") | plain).items() if v is not None}
        )
    except InputError as error:
        error.field = f"train.{error.field}" if error.field != "(whole file)" else "train"
        raise error.in_file(str(path)) from None
    return part


def _check_data(part: TrainPart, recipe: Recipe, where: str) -> None:
    """Refuse data of a recipe that its training would refuse."""
    try:
        options_of(training_of(part, recipe), recipe, out="nowhere")
    except InputError as error:
        raise error.in_file(where) from None


def _from_base(file: SweepFile, path: Path) -> list[Start]:
    if file.base is None:
        return []
    name, base = _base(file.base, path)
    if not file.list:
        return [(name, base, str(path))]
    return [_changed(base, change, index, path) for index, change in enumerate(file.list)]


def _base(base: str | Data, path: Path) -> tuple[str, Data]:
    """Return name and data of an inline mapping, a file, a shipped recipe, or a model of the catalog."""
    if isinstance(base, dict):
        inline = dict(base)
        extended = inline.pop("extends", None)
        below = {} if extended is None else _read(extended, path, "base.extends")
        return "base", merge(below, _located(inline, path))
    known = find_model(base)
    if base.endswith(RECIPE_SUFFIXES) or ("/" in base and known is None):
        return Path(base).stem, _read(base, path, "base")
    shipped, folded = catalog.recipes(), base.lower().replace("_", "-")
    if folded in shipped:
        return folded, read_data(shipped[folded])
    try:
        catalog.model_config(base)
    except InputError as error:
        remedy = f"{error.remedy}; or name a recipe's file, relative to this one"
        problem = "no file, shipped recipe or catalog model of that name"
        raise InputError(problem, remedy, field="base", value=base, file=str(path)) from None
    return known or base, {"model": {"config": base}}


def _read(name: Any, path: Path, field: str) -> Data:
    wrong = {"field": field, "value": name, "file": str(path)}
    if not isinstance(name, str) or not name.strip() or "\0" in name:
        raise InputError("not a path", "name one recipe file, relative to this one", **wrong)
    file = path.parent / name
    if not file.is_file():
        raise InputError("no such file", "name a recipe file, relative to this one", **wrong)
    return read_data(file)


def _located(data: Data, path: Path) -> Data:
    """Return ``data`` with the paths of its model and its data section, which are relative to the file."""
    try:
        return with_data_paths(with_model_config(written_out(data), path.parent), path.parent)
    except InputError as error:
        raise error.in_file(str(path)) from None


def _changed(base: Data, change: Data, index: int, path: Path) -> Start:
    """A variant of ``list``: ``name``, and fields either nested as in a recipe or dotted."""
    change = dict(change)
    name = change.pop("name", None)
    field = f"list[{index}].name"
    if not isinstance(name, str):
        problem = "missing" if name is None else "not text"
        raise InputError(problem, "give each variant a name", field=field, value=name, file=str(path))
    where = f"{path}: {_name(name, field, path)}"
    nested = {key: value for key, value in change.items() if "." not in key}
    data = merge(base, _located(nested, path))
    for key, value in change.items():
        if "." in key:
            data = _set(data, key, value, where)
    return name, data, where


def _set(data: Data, key: str, value: Any, where: str) -> Data:
    try:
        return set_field(data, key, value)
    except InputError as error:
        raise InputError(error.problem, error.remedy, field=key, value=value, file=where) from None


def _name(name: str, field: str, path: Path) -> str:
    if not name.strip() or len(name) > MAX_NAME or not name.isprintable():
        remedy = f"write 1 to {MAX_NAME} printable characters"
        raise InputError("not a name", remedy, field=field, value=name, file=str(path))
    return name


def _from_recipes(file: SweepFile, path: Path) -> list[Start]:
    starts: list[Start] = []
    for pattern in file.recipes:
        wrong = {"field": "recipes", "value": pattern, "file": str(path)}
        if not pattern or "\0" in pattern or Path(pattern).is_absolute():
            raise InputError("not a relative path", "name recipe files, relative to this one", **wrong)
        found = sorted(path.parent.glob(pattern)) if "*" in pattern else [path.parent / pattern]
        if not found or not all(one.is_file() for one in found):
            raise InputError("no such file", "name recipe files, relative to this one", **wrong)
        starts += [start for one in found for start in _recipes_in(one)]
    return starts


def _recipes_in(path: Path) -> list[Start]:
    """Return a recipe file, or the recipes of a JSON Lines file, which are named by file and line."""
    if path.suffix != LINES:
        return [(path.stem, read_data(path), str(path))]
    return [(where.removeprefix(f"{path.parent}/"), data, where) for where, data in recipe_lines(path)]


def _product(start: Start, file: SweepFile, path: Path) -> list[Start]:
    """Return ``start`` with every combination of the product's values, which alone name the variant."""
    if not file.product:
        return [start]
    name, data, where = start
    number = math.prod(map(len, file.product.values()))
    if number > MAX_VARIANTS:
        problem = f"{number:,} combinations"
        raise InputError(problem, f"at most {MAX_VARIANTS:,} are run", field="product", file=str(path))
    alone = not file.list and not file.recipes
    last = [field.rpartition(".")[2] for field in file.product]
    # ``batch.micro`` is shown as ``micro``, unless another field ends in it too.
    short = {
        field: key if last.count(key) == 1 else field for field, key in zip(file.product, last, strict=True)
    }
    varied = []
    for values in itertools.product(*file.product.values()):
        chosen = dict(zip(file.product, values, strict=True))
        words = " ".join(f"{short[key]}={_text(value)}" for key, value in chosen.items())
        full = words if alone else f"{name} {words}"
        place = f"{where}: {words}"
        changed = data
        for key, value in chosen.items():
            changed = _set(changed, key, value, place)
        varied.append((_name(full, "product", path), _located(changed, path), place))
    return varied


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text.replace('"', "").replace(" ", "")


def _variant(start: Start, settings: list[str], notes: list[str]) -> Variant:
    """Return the checked recipe of a start; ``notes`` gets how its names were read and what is ignored."""
    name, data, where = start
    recipe = recipe_from(data, settings, file=where, notes=notes)
    try:
        catalog.gpu(recipe.hardware.gpu)
        catalog.model_config(recipe.model.config)
    except InputError as error:
        raise error.in_file(where) from None
    notes += config_notes(recipe)
    return Variant(name=name, recipe=recipe)
