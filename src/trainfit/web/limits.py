"""Requests of the page as values: what they may hold, and how large they may be.

Nothing of a request is opened as a file or imported, but the config.json of a repository that is in this
machine's cache of the Hub, which is read as data. A recipe is checked field by field before it is used,
and is parsed by ``spec.parsing.parse`` alone, which reads no file.
"""

from typing import Any, NamedTuple

from trainfit.catalog import hub
from trainfit.catalog import load as catalog
from trainfit.catalog.names import find_model
from trainfit.catalog.other_files import is_no_recipe
from trainfit.spec.errors import InputError
from trainfit.spec.objective import Policy
from trainfit.spec.parsing.parse import parse
from trainfit.spec.parsing.plain_data import parse_json, parse_yaml
from trainfit.spec.parsing.synonyms import with_exact_choices, written_out
from trainfit.spec.recipe import RANDOM, Recipe
from trainfit.spec.units import GIB

MAX_BODY_BYTES = 256 * 1024
"""Of a request. The largest config.json of the catalog has 60 kB."""
MAX_GPUS = 4096
"""Ranks of a recipe. A trace of more takes minutes, and answers nothing that 4,096 do not."""
ENVIRONMENTS = ("arithmetic", "xiangqi")
"""Environments of reinforcement learning that are this package's own; others are files that would run."""
NO_FILES = "the page reads no file: leave it out, or run trainfit predict with the recipe"


class Bounds(NamedTuple):
    """Bounds of the work that a request may cause."""

    seconds: float = 300.0
    """Of one question, from the moment its turn comes."""
    memory_bytes: int = 8 * GIB
    """Resident memory of the process that traces."""
    waiting: int = 16
    """Questions that wait for their turn; further ones are refused."""


def recipe_of(data: Any) -> tuple[Recipe, list[str]]:
    """Return the recipe of a request's plain data, and a note for an ambiguous GPU's name.

    Args:
        data: a recipe's content, or a config.json's.

    Raises:
        InputError: wrong content, or a field that names a file.
    """
    if not isinstance(data, dict):
        raise InputError("not a recipe", "send a mapping", field="recipe", value=data)
    data = {"model": {"config": data}} if is_no_recipe(data) else data
    data = _with_cached_model(written_out(data))
    _refuse_paths(data)
    recipe = parse(Recipe, with_exact_choices(Recipe, data))
    _check(recipe)
    gpu = data.get("hardware", {}).get("gpu")
    note = catalog.names.gpu_note(gpu) if isinstance(gpu, str) else None
    return recipe, [note] if note else []


def pasted(text: str) -> dict[str, Any]:
    """Return the content of a pasted config.json or recipe, in JSON or YAML.

    Raises:
        InputError: it is neither, or has no such content.
    """
    is_json = text.lstrip().startswith("{")
    data = (
        parse_json(text, "the pasted text", tag_constants=True)
        if is_json
        else parse_yaml(text, "the pasted text")
    )
    if not isinstance(data, dict):
        remedy = "paste a config.json or a recipe"
        raise InputError("the pasted text is no mapping", remedy, value=data)
    recipe, _ = recipe_of(data)
    return recipe.model_dump(mode="json", exclude_unset=True)


def _with_cached_model(data: dict[str, Any]) -> dict[str, Any]:
    """Return data in which a repository of this machine's Hub cache is the content of its config.json."""
    model = data.get("model")
    config = model.get("config") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(config, str) or find_model(config) is not None:
        return data
    cached = hub.cached_model(config)
    if cached is None:
        return data
    named = {"name": cached["name"]} if model.get("name") is None else {}
    return {**data, "model": {**model, **named, "config": cached["config"]}}


def _refuse_paths(data: dict[str, Any]) -> None:
    """Refuse fields of unchecked data that name files, before anything could look for them."""
    model = data.get("model")
    config = model.get("config") if isinstance(model, dict) else None
    if isinstance(config, str) and find_model(config) is None:
        near = catalog.names_like(config, catalog.model_names()) if len(config) < 100 else []
        fetch = hub.how_to_fetch(config)
        other = f"paste its config.json, or {fetch}" if fetch else "paste its config.json"
        remedy = f"did you mean {', '.join(near)}? else {other}" if near else other
        problem = f"no model of that name in the catalog{' or in the Hub cache' if fetch else ''}"
        raise InputError(problem, remedy, field="model.config", value=config)
    weights = model.get("weights", RANDOM) if isinstance(model, dict) else RANDOM
    if weights != RANDOM:
        raise InputError("weights are files", NO_FILES, field="model.weights", value=weights)


def _check(recipe: Recipe) -> None:
    """Refuse what would read a file, run code, or take too long."""
    data = recipe.data
    named = {
        "data.train": (data.train, _is_no_file),
        "data.eval": (data.eval, _is_no_file),
        "data.tokenizer": (data.tokenizer, lambda text: False),
        "data.chat_template": (data.chat_template, lambda text: text == "chatml"),
    }
    for field, (value, is_fine) in named.items():
        if value is not None and not is_fine(value):
            raise InputError("this is a file", NO_FILES, field=field, value=value)
    objective = recipe.objective
    if isinstance(objective, Policy):
        if objective.environment not in ENVIRONMENTS:
            remedy = f"write one of {', '.join(ENVIRONMENTS)}; the time and memory are the same"
            field = "objective.environment"
            raise InputError("this is code in a file", remedy, field=field, value=objective.environment)
        if any(not isinstance(value, bool | int | float | None) for value in objective.arguments.values()):
            raise InputError("should be numbers here", NO_FILES, field="objective.arguments")
    if recipe.hardware.count > MAX_GPUS:
        remedy = f"write at most {MAX_GPUS:,}"
        raise InputError(
            "too many GPUs for the page", remedy, field="hardware.count", value=recipe.hardware.count
        )
    catalog.gpu(recipe.hardware.gpu)
    catalog.model_config(recipe.model.config)


def _is_no_file(text: str) -> bool:
    """Return whether a data set's name is one that this package generates."""
    return text.partition(":")[0] == "stories"
