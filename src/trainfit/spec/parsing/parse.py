"""Turn plain data into a value, and a ValidationError into one InputError.

The error names the first wrong field, its value, problem and remedy. Where that is an unknown key, the others
are named too.
"""

import functools
import json
import operator
import re
from collections.abc import Iterable
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from trainfit.spec.errors import InputError
from trainfit.spec.parsing.synonyms import field_here, near, value_here

EXPECTED = {
    "int_type": "a whole number", "int_from_float": "a whole number", "int_parsing": "a whole number",
    "float_type": "a number", "float_parsing": "a number",
    "bool_type": "true or false", "string_type": "text",
    "model_type": "a mapping", "model_attributes_type": "a mapping", "dict_type": "a mapping",
    "tuple_type": "a list", "list_type": "a list",
}  # fmt: skip
"""Expected value by the type of pydantic's error."""
REMEDIES = {"true or false": "write one of the two, without quotes", "a list": "write a list such as [a, b]"}
WITHOUT_KEYS = "leave the line out, or write its keys below it"
MAX_KEYS = 20  # Unknown keys that a message names after the first
BOUNDS = {"ge": "of at least", "gt": "above", "le": "of at most", "lt": "below"}


V = TypeVar("V", bound=BaseModel)


def parse(kind: type[V], data: Any, *, file: str = "") -> V:
    """Return plain ``data`` (mappings, lists, numbers, text) as a ``kind``.

    Raises:
        InputError: naming the first wrong field, its value and what to write instead.
    """
    try:
        # JSON mode is strict about numbers and text, and takes a list for a tuple.
        return kind.model_validate_json(json.dumps(data, allow_nan=True))
    except ValidationError as error:
        raise _as_input_error(kind, data, error, file) from None


def _as_input_error(kind: type[BaseModel], data: Any, error: ValidationError, file: str) -> InputError:
    """Return the InputError of the first wrong field of ``data``."""
    placed = [(_path(item["loc"], item["type"], data), item) for item in error.errors()]
    path, same = _first_field(placed)
    item = same[0]
    if item["type"] == "disagreement":
        path = item["ctx"]["field"].split(".")
    value = _lookup(data, path)
    field = ".".join(str(part) for part in path)
    if item["type"] == "disagreement":
        problem, remedy = item["ctx"]["problem"], item["ctx"]["remedy"]
    elif item["type"] == "extra_forbidden":
        problem, remedy = _unknown_key(kind, data, path)
        remedy += _other_unknown_keys(kind, data, placed, path)
    elif item["type"] == "missing":
        problem, remedy = "missing", f"add {path[-1]!r}"
    else:
        here = value_here(field, value)
        remedy = _remedy(kind, path, item, value) if here is None else f"here it is {field}: {here}"
        problem = _problem(kind, path, same, value)
    return InputError(problem, remedy, field=field or "(whole file)", value=value, file=file)


def _first_field(placed: list[tuple[list[Any], Any]]) -> tuple[list[Any], list[Any]]:
    """Return path and errors of the first unknown key, which may explain a missing one, else the first."""
    path, _ = next((pair for pair in placed if pair[1]["type"] == "extra_forbidden"), placed[0])
    return path, [item for other, item in placed if other == path]


def _path(location: Iterable[Any], kind: str, data: Any) -> list[Any]:
    """Return the location without the tags of unions that pydantic puts into it."""
    parts = list(location)
    path: list[Any] = []
    for index, part in enumerate(parts):
        inside = isinstance(data, dict) and part in data
        item = isinstance(data, list) and isinstance(part, int) and part < len(data)
        if inside or item:
            data = data[part]
            path.append(part)
        elif index == len(parts) - 1 and kind == "missing":
            path.append(part)
    return path


def _lookup(data: Any, path: Iterable[Any]) -> Any:
    try:
        return functools.reduce(operator.getitem, path, data)
    except (KeyError, IndexError, TypeError):
        return None


def _unknown_key(kind: type[BaseModel], data: Any, path: list[Any]) -> tuple[str, str]:
    key = str(path[-1])
    known = list(dict.fromkeys(_fields_at(kind, path[:-1])))
    if key in known:
        others = [name for name in _lookup(data, path[:-1]) if name != key]
        return f"does not go together with {', '.join(map(repr, others))}", "keep one of them"
    here = field_here(".".join(str(part) for part in path))
    if here is not None:
        return "unknown key", f"here it is {here}"
    meant = near(key, known)
    return "unknown key", f"did you mean {meant!r}?" if meant else f"known keys here: {', '.join(known)}"


def _other_unknown_keys(kind: type[BaseModel], data: Any, placed: list[Any], first: list[Any]) -> str:
    """Return the unknown keys after the ``first`` with their remedies, without a list of the known keys."""
    found: dict[str, str] = {}
    for path, item in placed:
        if item["type"] == "extra_forbidden" and path != first:
            problem, remedy = _unknown_key(kind, data, path)
            is_list = remedy.startswith("known keys")
            found[".".join(map(str, path))] = "" if problem != "unknown key" or is_list else f" ({remedy})"
    named = [f"{field}{remedy}" for field, remedy in found.items()]
    more = f", and {len(named) - MAX_KEYS:,} more" if len(named) > MAX_KEYS else ""
    return f"; also unknown: {', '.join(named[:MAX_KEYS])}{more}" if named else ""


def _models_at(kind: type[BaseModel], path: Iterable[Any]) -> list[type[BaseModel]]:
    """Return the kinds that ``path`` may hold: more than one in a union; of a list's items the list's."""
    models = [kind]
    for part in (part for part in path if not isinstance(part, int)):
        fields = [model.model_fields[part] for model in models if part in model.model_fields]
        models = [model for field in fields for model in _models_in(field.annotation)]
    return models


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in _models_in(part)]


def _fields_at(kind: type[BaseModel], path: list[Any]) -> list[str]:
    return [name for model in _models_at(kind, path) for name in model.model_fields]


def _keys(kind: type[BaseModel], path: list[Any]) -> str:
    joint = " or " if len(_models_at(kind, path)) > 1 else ", "
    names = joint.join(_fields_at(kind, path))
    return f" with {names}" if names else ""


def _problem(kind: type[BaseModel], path: list[Any], items: list[Any], value: Any) -> str:
    expected: list[str] = []
    for item in items:
        text = EXPECTED.get(item["type"])
        if text == "a mapping":
            text += _keys(kind, path)
        if item["type"].startswith("literal"):
            text = "one of " + _choices(item)
            if _models_at(kind, path):
                text += f", or a mapping{_keys(kind, path)}"
        if text and text not in expected:
            expected.append(text)
    if expected:
        return f"should be {', or '.join(expected)}" + (", not null" if value is None else "")
    if items[0]["type"] == "too_short":
        return "has no entries"
    message = items[0]["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return (message[:1].lower() + message[1:]).partition("; ")[0]


def _choices(item: Any) -> str:
    text = str(item.get("ctx", {}).get("expected", "")).replace("'", "").replace(" or ", ", ")
    return text.replace("False", "false").replace("True", "true")


def _remedy(kind: type[BaseModel], path: list[Any], item: Any, value: Any) -> str:
    expected = EXPECTED.get(item["type"])
    if expected in ("a whole number", "a number"):
        return _number_remedy(expected, str(path[-1]) if path else "", value)
    if expected == "text":
        return "write text" if isinstance(value, dict | list) or value is None else "quote it"
    if expected == "a mapping":
        return WITHOUT_KEYS if value is None else "write its keys, one a line"
    if expected is not None:
        return REMEDIES[expected]
    if item["type"].startswith("literal"):
        choices = _choices(item).split(", ")
        if value in ("true", "false") and value in choices:
            return f"write {value} without quotes"
        meant = near(str(value), choices)
        return f"did you mean {meant}?" if meant else "write one of these"
    return _bound_remedy(item)


def _bound_remedy(item: Any) -> str:
    for name, bound in item.get("ctx", {}).items():
        if name in BOUNDS:
            return f"write a number {BOUNDS[name]} {f'{bound:g}' if isinstance(bound, float) else bound}"
    if item["type"] == "too_short":
        return "write at least one"
    if item["type"] == "finite_number":
        return "write a finite number"
    return item["msg"].partition("; ")[2] or "correct it"


def _number_remedy(expected: str, field: str, value: Any) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return f"write {int(value)}"
    if isinstance(value, str) and re.fullmatch(r"\s*[-+]?[\d.]+([eE][-+]?\d+)?\s*", value):
        return "write the number without quotes"
    if field == "seq" and isinstance(value, str) and re.fullmatch(r"\s*\d+[\d.,]*\s*[kK]\s*", value):
        return "write a whole number, or 8k"
    if isinstance(value, str) and re.fullmatch(r"\s*\$?\s*[-+]?[\d.,]+\s*[A-Za-z/%$]*\s*", value):
        return f"write the number {'of GiB ' * field.endswith('_gib')}alone, without a unit"
    return "write one such as 1" if expected == "a whole number" else "write one such as 0.1"
