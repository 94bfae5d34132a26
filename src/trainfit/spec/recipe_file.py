"""Recipe files: YAML 1.2 read as data, ``extends`` chains, ``--set a.b=c``, one-line errors.

Enters: a path and settings. Leaves: a Recipe. Refused: files over 1 MB, duplicate keys, aliases that expand to
more than the file could say plainly, NaN and infinity, unknown keys, cycles of ``extends``.
"""

import json
import math
from pathlib import Path
from typing import Any

from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe
from trainfit.spec.value import parse

MAX_FILE_BYTES = 1_000_000
MAX_NODES = 100_000
MAX_DEPTH = 64


def load_recipe(path: str | Path, settings: list[str] | None = None) -> Recipe:
    """Read a recipe file and what it extends, apply ``settings`` (``a.b=c``) and check it.

    Raises:
        InputError: bad content, told in one line with file, field, value and remedy.
        FileNotFoundError, PermissionError: the file cannot be read.
    """
    path = Path(path)
    data = apply_settings(_load_chain(path, ()), settings or [])
    return parse(Recipe, _with_model_config(data, Path.cwd()), file=str(path))


def recipe_from(data: dict[str, Any], settings: list[str] | None = None, *, file: str = "") -> Recipe:
    """A recipe from plain data, such as a record's; paths are relative to the working directory."""
    return parse(Recipe, _with_model_config(apply_settings(data, settings or []), Path.cwd()), file=file)


def read_yaml(path: Path) -> Any:
    """One YAML 1.2 document as plain data (dict, list, str, int, float, bool, None)."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    text = read_text(path)
    yaml = YAML(typ="safe", pure=True)
    yaml.allow_duplicate_keys = False
    try:
        _refuse_aliases_that_grow(yaml.compose(text), str(path))
        data = yaml.load(text)
    except YAMLError as error:
        raise _yaml_error(error, path) from None
    except RecursionError:
        raise InputError("nested too deeply", f"nest at most {MAX_DEPTH} levels", file=str(path)) from None
    return _plain(data, str(path))


def read_json(path: Path) -> Any:
    """One JSON document as plain data; NaN, infinity and duplicate keys are refused."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        for key in keys:
            if keys.count(key) > 1:
                raise InputError("duplicate key", "keep one of them", field=key, file=str(path))
        return dict(pairs)

    def no_constant(text: str) -> Any:
        raise InputError(f"{text} is not JSON", "write a finite number or null", file=str(path))

    try:
        return json.loads(read_text(path), object_pairs_hook=unique, parse_constant=no_constant)
    except json.JSONDecodeError as error:
        raise InputError(f"not JSON: {error.msg} at line {error.lineno}", "correct it", file=str(path)) from None
    except RecursionError:
        raise InputError("nested too deeply", f"nest at most {MAX_DEPTH} levels", file=str(path)) from None


def read_text(path: Path) -> str:
    """The file's text, if it is at most 1 MB of UTF-8."""
    if path.is_dir():
        raise InputError("is a folder", "name a file", file=str(path))
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise InputError(f"file has {size:,} bytes", f"at most {MAX_FILE_BYTES:,} are read", file=str(path))
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InputError("not UTF-8 text", "save it as UTF-8", file=str(path)) from None


def apply_settings(data: dict[str, Any], settings: list[str]) -> dict[str, Any]:
    """``data`` with each ``a.b=c`` set; c is read as YAML, so ``false``, ``1e-4`` and ``{every: 2}`` mean what they say."""
    for setting in settings:
        key, equals, text = setting.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            raise InputError("not a setting", "write --set field.name=value", value=setting, field="--set")
        data = _set(data, parts, _setting_value(setting, text))
    return data


def _setting_value(setting: str, text: str) -> Any:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        return _plain(YAML(typ="safe", pure=True).load(text), "--set")
    except YAMLError:
        raise InputError("value is not YAML", "quote it", value=setting, field="--set") from None


def _set(data: Any, parts: list[str], value: Any) -> dict[str, Any]:
    base = dict(data) if isinstance(data, dict) else {}
    base[parts[0]] = value if len(parts) == 1 else _set(base.get(parts[0]), parts[1:], value)
    return base


def _load_chain(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    resolved = path.resolve()
    if resolved in seen:
        chain = " -> ".join(p.name for p in (*seen, resolved))
        raise InputError("extends itself", f"break the cycle {chain}", field="extends", file=str(path))
    data = read_yaml(path)
    if not isinstance(data, dict):
        raise InputError("not a mapping", "write fields such as 'model:' and 'batch:'", file=str(path))
    data = _with_model_config(data, path.parent)
    base = data.pop("extends", None)
    if base is None:
        return data
    if not isinstance(base, str):
        raise InputError("not a path", "name one recipe file", field="extends", value=base, file=str(path))
    try:
        return merge(_load_chain(path.parent / base, (*seen, resolved)), data)
    except FileNotFoundError:
        raise InputError("no such file", "name a recipe beside this one", field="extends", value=base, file=str(path)) from None


REPLACED_WHOLE = ("config", "recompute")
"""Mappings that are one value: an extending recipe replaces them, it does not mix keys into them."""


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """``over`` laid on ``base``: mappings merge key by key, everything else is replaced."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict) and key not in REPLACED_WHOLE
        merged[key] = merge(base[key], value) if both else value
    return merged


def _with_model_config(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A path to a config.json becomes its content, so that a recipe is whole wherever it travels."""
    model = data.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("config"), str):
        return data
    text = model["config"]
    if not (text.endswith(".json") or "/" in text or "\\" in text):
        return data
    path = folder / text
    if path.is_dir():
        path = path / "config.json"
    try:
        config = read_json(path)
    except FileNotFoundError:
        raise InputError("no such file", "name a config.json, or a model of the catalog", field="model.config", value=text) from None
    if not isinstance(config, dict):
        raise InputError("not a mapping", "write a config.json's object", field="model.config", file=str(path))
    name = model.get("name") or (path.parent.name if path.name == "config.json" else path.stem)
    return {**data, "model": {**model, "config": config, "name": name}}


def _yaml_error(error: Any, path: Path) -> InputError:
    mark = getattr(error, "problem_mark", None)
    where = f" at line {mark.line + 1}" if mark is not None else ""
    problem = str(getattr(error, "problem", None) or error).splitlines()[0]
    if "duplicate key" in problem:
        return InputError(f"{problem}{where}", "keep one of them", file=str(path))
    return InputError(f"not YAML: {problem}{where}", "correct it", file=str(path))


def _refuse_aliases_that_grow(node: Any, file: str) -> None:
    """Count nodes as if every alias were written out, without writing it out (a 'billion laughs' file)."""
    sizes: dict[int, int] = {}

    def size(node: Any, depth: int) -> int:
        if node is None:
            return 0
        if depth > MAX_DEPTH:
            raise InputError("nested too deeply", f"nest at most {MAX_DEPTH} levels", file=file)
        key = id(node)
        if key not in sizes:
            sizes[key] = MAX_NODES + 1  # A node inside itself never ends.
            children = node.value if isinstance(node.value, list) else []
            flat = [n for child in children for n in (child if isinstance(child, tuple) else (child,))]
            sizes[key] = 1 + sum(size(child, depth + 1) for child in flat)
        if sizes[key] > MAX_NODES:
            raise InputError("aliases expand without end", f"write at most {MAX_NODES:,} values", file=file)
        return sizes[key]

    size(node, 0)


def _plain(data: Any, file: str, field: str = "") -> Any:
    if isinstance(data, dict):
        for key in data:
            if not isinstance(key, str):
                raise InputError("key is not text", "quote it", field=field or "(top)", value=key, file=file)
        return {key: _plain(value, file, f"{field}.{key}".lstrip(".")) for key, value in data.items()}
    if isinstance(data, list):
        return [_plain(value, file, f"{field}[{index}]") for index, value in enumerate(data)]
    if isinstance(data, float) and not math.isfinite(data):
        raise InputError("not a finite number", "write a finite number", field=field, value=data, file=file)
    if data is None or isinstance(data, bool | int | float | str):
        return data
    raise InputError(f"a {type(data).__name__} is not a recipe's value", "write text or a number", field=field, value=str(data), file=file)
