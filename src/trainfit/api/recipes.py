"""Read a recipe from a name, a file, a config.json, a mapping or a Recipe, with fields set on it.

Shared by the command line and the Python functions. No torch here.
"""

import contextlib
import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

from pydantic import BaseModel

from trainfit.catalog import hub
from trainfit.catalog import load as catalog
from trainfit.catalog.hub import HUB_NAME
from trainfit.catalog.names import find_model
from trainfit.catalog.other_files import is_no_recipe
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.plain_data import plain, read_config
from trainfit.spec.parsing.recipe_file import SETTINGS, merge, recipe_from, recipe_of_model
from trainfit.spec.parsing.recipe_file import load_recipe as load_file
from trainfit.spec.recipe import RANDOM, Recipe
from trainfit.spec.value import texts

"""A repository on the Hub: its owner and its name."""

Source = str | os.PathLike[str] | Mapping[str, Any] | Recipe
"""Sources of a recipe."""


class FieldsButData(TypedDict, total=False):
    """Keyword arguments that set fields of a recipe: short names of some, and the recipe's own fields.

    ``set`` takes any field by its dotted name: ``{"batch.micro": 8}``, or one or a list of the command line's
    ``batch.micro=8``. A mapping is laid on the recipe's own (``batch={"micro": 8}`` keeps ``batch.seq``);
    docs/reference/recipe.md lists all fields.
    """

    gpu: str
    """hardware.gpu"""
    count: int
    """hardware.count"""
    price: float
    """hardware.price_per_hour, US dollars"""
    seq: int | str
    """batch.seq, such as 8192 or ``"8k"``"""
    set: Mapping[str, Any] | Sequence[str] | str
    model: Mapping[str, Any]
    batch: int | Mapping[str, int]
    """A number is batch.micro."""
    precision: str
    attention: str
    block_kernels: str
    fp8_weights: str
    fp8_scaling: str
    accumulation: str
    loss: str
    loss_terms: Mapping[str, float]
    objective: str | Mapping[str, Any]
    recompute: str | Mapping[str, Any]
    compile: bool | str
    optimizer: str | Mapping[str, Any]
    adapter: str | Mapping[str, Any] | None
    quantize: str | None
    offload: Mapping[str, bool]
    loader: Mapping[str, Any]
    empty_cache_every: int | None
    parallel: Mapping[str, Any]
    hardware: str | Mapping[str, Any]
    seed: int


class RecipeFields(FieldsButData, total=False):
    """Keyword arguments that set fields of a recipe, its data too."""

    data: str | Mapping[str, Any]
    """A text is data.train."""


SHORT = {
    "gpu": "hardware.gpu",
    "count": "hardware.count",
    "price": "hardware.price_per_hour",
    "seq": "batch.seq",
}
"""Keyword arguments that are no field of a recipe -> the field that they set."""


def load_recipe(recipe: Source, **fields: Unpack[RecipeFields]) -> Recipe:
    """Return the recipe that ``recipe`` names or holds, with ``fields`` set.

    An ambiguous GPU name (``h100``) is taken for one row of the catalog, with a Python warning.

    Args:
        recipe: a catalog model or shipped recipe in any spelling, a model's name on the Hub, the path of a
            recipe file or of a config.json (or its folder), a mapping with a recipe's or a config.json's
            content, or a Recipe.
        fields: see RecipeFields.

    Raises:
        InputError: no such name, or wrong content; one line with the field, its value and what to write.
        OSError: the file cannot be read.
    """
    return wanted(recipe, fields, stacklevel=3)


def wanted(source: Source, fields: RecipeFields, *, stacklevel: int) -> Recipe:
    """Return the recipe as ``load_recipe`` does; ``stacklevel`` is that of its warnings."""
    over, settings = fields_of(fields)
    with _of_call():
        recipe, notes = read(source, settings, over)
    for note in notes:
        warnings.warn(note, stacklevel=stacklevel)
    return recipe


def read(
    source: Source, settings: Sequence[str] = (), over: dict[str, Any] | None = None
) -> tuple[Recipe, list[str]]:
    """Return the recipe that ``source`` names or holds, and a line for each ambiguous name in it.

    Text names a file, else a shipped recipe, else a catalog model with every default. A model's config.json
    (its folder, or its content) is that model with every default.

    Args:
        settings: ``a.b=c``, as the command line has them.
        over: fields laid on the recipe before the settings, as those of a recipe that extends it.

    Raises:
        InputError: no such name, or wrong content.
        OSError: the file cannot be read.
    """
    notes: list[str] = []
    if isinstance(source, Recipe):
        recipe = _changed(source, list(settings), over, notes)
    elif isinstance(source, Mapping):
        data = as_plain(source)
        data = {"model": {"config": data}} if is_no_recipe(data) else data
        recipe = recipe_from(data, list(settings), over=over, notes=notes)
    elif isinstance(source, str | os.PathLike):
        recipe = _named_recipe(source, list(settings), over, notes)
    else:
        remedy = "give a name, a path, a mapping or a Recipe"
        raise InputError("not a recipe", remedy, field="recipe", value=source)
    with named(label(source), settings, over):  # Before anything slow is imported.
        catalog.gpu(recipe.hardware.gpu)
        catalog.model_config(recipe.model.config)
    return recipe, notes


def label(source: Source) -> str:
    """Return the name or path of a recipe for error messages; empty for a value."""
    return "" if isinstance(source, Recipe | Mapping) else os.fspath(source)


def fields_of(fields: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return keyword arguments as a recipe's data, and the settings among them.

    Raises:
        InputError: a value that no recipe can hold, or two that set the same field.
    """
    data = as_plain({name: value for name, value in fields.items() if name not in (*SHORT, "set")})
    for name in (short for short in SHORT if short in fields):  # The GPU first, whose name may have a count.
        field, _, key = SHORT[name].partition(".")
        inner = data.get(field)
        if isinstance(inner, dict) and key in inner:
            raise InputError(
                f"{SHORT[name]} is given twice", "keep one of them", field=name, value=fields[name]
            )
        data = merge(data, {field: {key: as_plain(fields[name], name)}})
    return data, _settings(fields.get("set", ()))


def _settings(given: Any) -> list[str]:
    if isinstance(given, Mapping):
        return [f"{field}={json.dumps(value)}" for field, value in as_plain(given, "set").items()]
    return list(texts(given, field="set", remedy='write {"batch.micro": 8} or ["batch.micro=8"]'))


def as_plain(data: Any, field: str = "") -> Any:
    """Return ``data`` as JSON: mappings as dicts, tuples as lists, paths as text, values by their content.

    Raises:
        InputError: it holds something else, such as a tensor.
    """
    return plain(_unwrapped(data), field=field)


def _unwrapped(data: Any) -> Any:
    if isinstance(data, BaseModel):
        return data.model_dump(mode="json", exclude_unset=True)
    if isinstance(data, Mapping):
        return {key: _unwrapped(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_unwrapped(value) for value in data]
    return os.fspath(data) if isinstance(data, os.PathLike) else data


def _changed(recipe: Recipe, settings: list[str], over: dict[str, Any] | None, notes: list[str]) -> Recipe:
    """Return the recipe with fields set.

    Derived fields of its optimizer (implementation) are derived anew.
    """
    if not settings and not over:
        return recipe
    optimizer = recipe.optimizer.model_dump(mode="json", exclude_unset=True)
    return recipe_from({**recipe.content(), "optimizer": optimizer}, settings, over=over, notes=notes)


def _named_recipe(
    source: str | os.PathLike[str], settings: list[str], over: dict[str, Any] | None, notes: list[str]
) -> Recipe:
    text = os.fspath(source)
    if "\0" in text:
        raise InputError("has a NUL character in it", "remove it", field="recipe", value=text)
    if _is_model_config(Path(text)):
        return recipe_of_model(text, settings, over=over, notes=notes)
    is_path = _is_path(text) or not isinstance(source, str)
    if not is_path and find_model(text) is None and (model := hub.cached_model(text)) is not None:
        return recipe_from({"model": model}, settings, over=over, notes=notes)
    path = Path(text) if is_path else _shipped(text)
    if path is None:
        return recipe_from({"model": {"config": text}}, settings, over=over, notes=notes)
    return load_file(path, settings, over=over, notes=notes)


def unread_weights(source: Source, recipe: Recipe) -> tuple[str, ...]:
    """Return a note where a model's folder has weights too, and the recipe starts from random ones."""
    folder = Path(source) if isinstance(source, str | os.PathLike) else None
    if folder is None or recipe.model.weights != RANDOM or not folder.is_dir():
        return ()
    if not any(folder.glob("model*.safetensors")):
        return ()
    return (
        f"the folder's weights are not read: model.weights is random; --weights {folder} starts from them",
    )


def is_known(text: str) -> bool:
    """Return whether it is a file, a shipped recipe, or a model of the catalog."""
    return Path(text).is_file() or text.lower() in catalog.recipes() or find_model(text) is not None


def _is_path(text: str) -> bool:
    """Return whether it names a file, existing or not; text like ``owner/name`` only if it exists."""
    if text.endswith((".yaml", ".yml", ".json")) or Path(text).is_file():
        return True
    return "/" in text and not (HUB_NAME.fullmatch(text) and not Path(text).parent.is_dir())


def _is_model_config(path: Path) -> bool:
    """Return whether the file, or ``config.json`` in the folder, is a model's config and no recipe."""
    if path.is_dir():
        return True
    if path.suffix != ".json" or not path.is_file():
        return False
    data = read_config(path)
    return (
        not isinstance(data, Mapping)
        or is_no_recipe(data)
        or not data.keys() & {"extends", *Recipe.model_fields}
    )


@contextlib.contextmanager
def named(text: str, settings: Sequence[str] = (), over: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Name the recipe (``text``) in errors about its fields, or ``--set`` where a setting gave the value.

    Nothing is named where a keyword argument (``over``) gave it.
    """
    try:
        yield
    except InputError as error:
        if error.field.partition(".")[0] not in Recipe.model_fields:
            raise
        keys = [setting.partition("=")[0].strip() for setting in settings]
        if any(f"{error.field}.".startswith(f"{key}.") for key in keys):
            raise error.in_file(SETTINGS) from error.__cause__
        if _gives(over or {}, error.field.split(".")):
            raise
        raise error.in_file(text) from error.__cause__


@contextlib.contextmanager
def errors_name(source: Source, fields: RecipeFields) -> Iterator[None]:
    """Do as ``named``, for the arguments of a Python function."""
    over, settings = fields_of(fields)
    with _of_call(), named(label(source), settings, over):
        yield


@contextlib.contextmanager
def _of_call() -> Iterator[None]:
    """Name the argument ``set`` in errors where the command line's option would be named."""
    try:
        yield
    except InputError as error:
        if error.file != SETTINGS:
            raise
        remedy = error.remedy.replace("--set field.name=value", 'set={"field.name": value}')
        raise InputError(
            error.problem, remedy, field=error.field, value=error.value, file="set"
        ) from error.__cause__


def _gives(data: Any, field: Sequence[str]) -> bool:
    """Return whether the mapping sets the field, or a mapping that contains it."""
    for part in field:
        if not isinstance(data, Mapping):
            return True  # A short form such as hardware="h100".
        if part not in data:
            return False
        data = data[part]
    return True


def _shipped(name: str) -> Path | None:
    """The shipped recipe's file, or None where ``name`` is a model of the catalog."""
    recipes = catalog.recipes()
    folded = name.lower().replace("_", "-")
    if folded in recipes or find_model(name) is not None:
        return recipes.get(folded)
    near = catalog.names_like(name, [*recipes, *catalog.model_names()])
    known = f"did you mean {', '.join(near)}?" if near else f"shipped recipes: {', '.join(recipes)}"
    if fetch := hub.how_to_fetch(name):
        known = f"did you mean {', '.join(near)}? else {fetch}" if near else fetch
    raise InputError(
        "no file, shipped recipe or catalog model of that name", known, field="RECIPE", value=name
    )
