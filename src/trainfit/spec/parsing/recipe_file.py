"""Recipe files: ``extends`` chains, ``--set a.b=c``, short forms, and errors that name the file of a value.

A relative ``extends`` or config path is relative to its file; one in a setting, to the working directory.
"""

import io
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainfit.spec import files
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.parse import parse
from trainfit.spec.parsing.plain_data import MAX_DEPTH, parse_json, parse_yaml, plain, read_config, read_yaml
from trainfit.spec.parsing.synonyms import main_key, with_exact_choices, written_out
from trainfit.spec.recipe import RANDOM, Recipe, hub, names

MAX_CHAIN = 32
MAX_LINES_BYTES = 100 * 10**6
"""Of a JSON Lines file of recipes."""
SETTINGS = "--set"
CALL = ""
"""The place of fields that a Python call gives: an error names the field alone."""

REPLACED_WHOLE = ("config", "recompute")
"""Mappings that are one value: an extending recipe replaces them, it does not mix keys into them."""

Layer = tuple[str, dict[str, Any]]
"""The place of values (a file, or ``--set``), and the values."""


def load_recipe(
    path: str | Path,
    settings: list[str] | None = None,
    *,
    over: dict[str, Any] | None = None,
    notes: list[str] | None = None,
) -> Recipe:
    """Read a recipe file and those it extends, apply ``settings`` (``a.b=c``) and check it.

    Args:
        over: fields laid on it, as those of a recipe that extends it; ``settings`` are applied after them.
        notes: gets a line for each ambiguous name, with the row it was taken for.

    Raises:
        InputError: bad content; one line with file, field, value and remedy.
        OSError: the file cannot be read.
    """
    return _check(_chain(Path(path)), settings, over, notes)


def recipe_from(
    data: dict[str, Any],
    settings: list[str] | None = None,
    *,
    file: str = "",
    over: dict[str, Any] | None = None,
    notes: list[str] | None = None,
) -> Recipe:
    """Return the recipe of plain data, such as a record's; ``over`` and ``notes`` as in ``load_recipe``."""
    return _check([(file, data)], settings, over, notes)


def written(recipe: Recipe) -> str:
    """Return a recipe file's text: the fields that differ from their defaults, as YAML."""
    from ruamel.yaml import YAML

    data = recipe.model_dump(mode="json", exclude_defaults=True)
    text, writer = io.StringIO(), YAML(typ="safe", pure=True)
    writer.default_flow_style = False
    writer.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    writer.dump(data, text)
    return text.getvalue()


def read_data(path: Path) -> dict[str, Any]:
    """Return the unchecked content of a recipe file and those it extends; raises as ``load_recipe``."""
    return _together(_chain(path))


def set_field(data: dict[str, Any], field: str, value: Any) -> dict[str, Any]:
    """Return ``data`` with the dotted ``field`` set, as ``--set`` does."""
    return _set_whole(data, field.split("."), value, f"{field}: {value}")


def recipe_of_model(config_file: str, settings: list[str] | None = None, **options: Any) -> Recipe:
    """Return the recipe of a config.json or its folder; ``options`` as in ``load_recipe``."""
    path = Path(config_file)
    config = f"{path}/" if path.is_dir() else str(path.absolute())
    data = with_model_config({"model": {"config": config}}, Path.cwd())
    return recipe_from(data, settings, file=config_file, **options)


def recipe_lines(path: Path) -> Iterator[Layer]:
    """Yield each recipe of a JSON Lines file as unchecked plain data, with its place ``file:number``."""
    for number, line in enumerate(files.read_text(path, MAX_LINES_BYTES).splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        data = parse_json(line, where)
        if not isinstance(data, dict):
            raise InputError("not a recipe", "write a mapping", value=data, file=where)
        yield where, data


def apply_settings(data: dict[str, Any], settings: list[str]) -> dict[str, Any]:
    """Return ``data`` with each ``a.b=c`` set; c is read as YAML: ``false``, ``1e-4``, ``{every: 2}``."""
    counts: dict[Any, str] = {}
    for setting in settings:
        parts, value = _setting(setting)
        data = _set_whole(data, parts, value, setting)
        if parts[0] == "hardware" and _names_count(parts, value):
            counts[data["hardware"].get("count")] = setting
    if len(counts) > 1:
        problem, remedy = (
            f"the count of GPUs is set twice: {' and '.join(counts.values())}",
            "keep one of them",
        )
        raise InputError(problem, remedy, field="hardware.count", file=SETTINGS)
    return data


def _names_count(parts: list[str], value: Any) -> bool:
    """Return whether a setting of ``hardware`` sets the count, by itself or on the GPU's name."""
    if parts[1:] == ["count"]:
        return True
    return parts[1:] in ([], ["gpu"]) and isinstance(value, str) and names().counted(value)[1] is not None


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe ``over`` laid on ``base``: mappings merge key by key, other values are replaced."""
    return _merge(written_out(base), written_out(over))


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict) and key not in REPLACED_WHOLE
        merged[key] = _merge(base[key], value) if both else value
    return merged


def _together(layers: list[Layer]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for _, values in layers:
        data = merge(data, values)
    return data


def _check(
    layers: list[Layer], settings: list[str] | None, over: dict[str, Any] | None, notes: list[str] | None
) -> Recipe:
    settings = settings or []
    layers = [(file, written_out(values)) for file, values in (*layers, (CALL, over or {}))]
    from_settings = [(SETTINGS, apply_settings({}, [setting])) for setting in settings]
    data = with_model_config(apply_settings(_together(layers), settings), Path.cwd())
    data = with_model_config(_with_config_of_weights(data), Path.cwd())
    data = with_exact_choices(Recipe, data)
    try:
        recipe = parse(Recipe, data)
    except InputError as error:
        raise error.in_file(_file_of(error.field, [*layers, *from_settings])) from None
    if notes is not None and "gpu" in data.get("hardware", {}):
        note = names().gpu_note(data["hardware"]["gpu"])
        notes += [] if note is None else [note]
    return recipe


def _file_of(field: str, layers: list[Layer]) -> str:
    """Return the last layer that has the field, else the topmost file."""
    for file, data in reversed(layers):
        found: Any = data
        for part in field.split("."):
            found = found.get(part, layers) if isinstance(found, dict) else layers
        if found is not layers:
            return file
    files = [file for file, _ in layers if file not in (SETTINGS, CALL)]
    return files[-1] if files else ""


def _setting(setting: str) -> tuple[list[str], Any]:
    key, equals, text = setting.partition("=")
    parts = _folded(key.strip().split("."))
    if not equals or not all(parts):
        raise InputError("not a setting", "write --set field.name=value", value=setting, file=SETTINGS)
    if len(parts) > MAX_DEPTH:
        remedy = f"nest at most {MAX_DEPTH} levels"
        raise InputError("nested too deeply", remedy, value=setting, file=SETTINGS)
    plain(parts, SETTINGS)
    try:
        return parts, parse_yaml(text)
    except InputError as error:
        remedy = error.remedy if error.remedy != "correct it" else "quote the value"
        raise InputError(error.problem, remedy, field=key.strip(), value=text, file=SETTINGS) from None


def _folded(parts: list[str]) -> list[str]:
    """Return a field's name in lower case; keys of a model's config stay as they are."""
    folded = [part.lower() for part in parts]
    inner = folded.index("config") + 1 if "config" in folded else len(parts)
    return [*folded[:inner], *parts[inner:]]


def _set_whole(data: dict[str, Any], parts: list[str], value: Any, setting: str) -> dict[str, Any]:
    """Return a recipe's ``data`` with a field set; ``batch=4`` keeps the batch's other keys."""
    key = main_key(parts[0], value) if len(parts) == 1 else None
    changed = _set(written_out(data), parts if key is None else [*parts, key], value, setting)
    return written_out(changed, replaces_count=True)


def _set(data: Any, parts: list[str], value: Any, setting: str) -> dict[str, Any]:
    head, *rest = parts
    if not rest:
        return {**data, head: value}
    inner = data.get(head)
    if head == "config" and isinstance(inner, str):
        problem = f"config is the name {inner!r}, which has no keys to set"
        remedy = "set model.config to a path or a mapping first"
        raise InputError(problem, remedy, value=setting, file=SETTINGS)
    keep = isinstance(inner, dict) and head != "recompute"
    return {**data, head: _set(inner if keep else {}, rest, value, setting)}


def _chain(path: Path) -> list[Layer]:
    """Return the recipe's file and those it extends, the most basic first."""
    layers: list[Layer] = []
    seen: list[Path] = []
    while True:
        data, base = _layer(path)
        seen.append(_real(path))
        layers.insert(0, (str(path), data))
        if base is None:
            return layers
        named, path = path, path.parent / base
        chain = " -> ".join(p.name for p in (*seen, path))
        wrong = {"field": "extends", "value": base, "file": str(named)}
        if _real(path) in seen:
            raise InputError("extends itself", f"break the cycle {chain}", **wrong)
        if len(seen) >= MAX_CHAIN:
            raise InputError(f"the chain is over {MAX_CHAIN} files long", "shorten it", **wrong)
        if not path.is_file():
            raise InputError("no such file", "name a recipe file, relative to this one", **wrong)


def _real(path: Path) -> Path:
    """Return the path without links; unlike ``Path.resolve``, this raises on no circle of links."""
    return Path(os.path.realpath(path))


def _layer(path: Path) -> tuple[dict[str, Any], str | None]:
    file = str(path)
    data = read_yaml(path)
    fields = "write fields such as 'model:' and 'batch:'"
    if data is None:
        raise InputError("the file is empty", fields, file=file)
    if not isinstance(data, dict):
        raise InputError("not a mapping", fields, file=file)
    base = data.pop("extends", None)
    if base is not None and (not isinstance(base, str) or not base.strip() or "\0" in base):
        raise InputError("not a path", "name one recipe file", field="extends", value=base, file=file)
    try:
        return with_data_paths(with_model_config(written_out(data), path.parent), path.parent), base
    except InputError as error:
        raise error.in_file(file) from None


DATA_PATHS = ("train", "eval", "tokenizer", "chat_template")


def with_data_paths(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return ``data`` with paths in its data section that exist relative to ``folder`` joined to it."""
    section = data.get("data")
    if not isinstance(section, dict):
        return data
    joined: dict[str, Any] = {}
    for name in DATA_PATHS:
        text = section.get(name)
        if isinstance(text, str) and text and "\0" not in text and os.path.exists(folder / text):
            joined[name] = str(folder / text)
    return {**data, "data": {**section, **joined}}


def with_model_config(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return ``data`` with a model.config that is a path, relative to ``folder``, replaced by its mapping.

    A model's name on the Hub (``Qwen/Qwen3-8B``) is no path, unless there is such a file; of one that the
    catalog lacks, the config.json in this machine's cache of the Hub is taken. A path of ``model.weights``
    is made absolute.
    """
    model = data.get("model")
    if not isinstance(model, dict):
        return data
    model = _with_weights(model, folder)
    data = {**data, "model": model}
    if not isinstance(model.get("config"), str):
        return data
    text = model["config"]
    if not (text.endswith(".json") or "/" in text or "\\" in text):
        return data
    remedy = "name a config.json, or a model of the catalog"
    if "\0" in text:
        raise InputError("not a path", remedy, field="model.config", value=text)
    path = folder / text
    if names().find_model(text) is not None and not path.exists():
        return data
    problem = "no such file"
    if path.is_dir():
        path = path / "config.json"
        problem = "this folder has no config.json"
        if (path.parent / "adapter_config.json").is_file():
            problem += ", but an adapter's adapter_config.json"
            remedy = "name its base model, and add --set adapter=lora"
    try:
        config = read_config(path)
    except (FileNotFoundError, NotADirectoryError):
        if (cached := hub().cached_model(text)) is not None:
            return {**data, "model": {**cached, **model, "config": cached["config"]}}
        if fetch := hub().how_to_fetch(text):
            remedy = f"{remedy}; or {fetch}"
        raise InputError(problem, remedy, field="model.config", value=text) from None
    if not isinstance(config, dict):
        remedy = "write a config.json's object"
        raise InputError("not a mapping", remedy, field="model.config", file=str(path))
    name = model.get("name") or (_real(path).parent.name if path.name == "config.json" else path.stem)
    return {**data, "model": {**model, "config": config, "name": name}}


def _with_weights(model: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a model with the path of its weights, if it is one, made absolute."""
    weights = model.get("weights")
    if not isinstance(weights, str) or weights in ("", RANDOM) or "\0" in weights:
        return model
    path = folder / Path(weights).expanduser()
    is_path = path.is_dir() or weights.startswith((".", "/", "~"))
    return {**model, "weights": os.path.abspath(path) if is_path else weights}


def _with_config_of_weights(data: dict[str, Any]) -> dict[str, Any]:
    """Return ``data`` with the config of its weights, if it names none."""
    model = data.get("model")
    weights = model.get("weights") if isinstance(model, dict) and "config" not in model else None
    if not isinstance(weights, str) or weights == RANDOM:
        return data
    config = f"{weights}/" if os.path.isabs(weights) else weights.partition("@")[0]
    return {**data, "model": {**data["model"], "config": config}}


def flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a recipe's content by dotted field; a model's config and ``recompute`` are one value each."""
    found: dict[str, Any] = {}
    for name, value in data.items():
        whole = f"{prefix}{name}" in ("recompute", "model.config")
        if isinstance(value, Mapping) and not whole:
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found
