"""The base of every noun, and how a plain mapping becomes one with a one-line error.

A value is frozen, strict (no silent conversion of text to numbers), refuses unknown keys, NaN and infinity.
"""

import difflib
import json
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainfit.spec.errors import InputError

Count = Annotated[int, Field(ge=0)]
PositiveInt = Annotated[int, Field(ge=1)]
Bytes = Annotated[int, Field(ge=0)]
Flops = Annotated[float, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0)]
"""A ratio such as MFU: 0.45 is 45 %. It may exceed 1 only where a measurement contradicts a data sheet."""


class Value(BaseModel):
    """A frozen, strict value; change it with ``model_copy(update=...)``."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


V = TypeVar("V", bound=BaseModel)


def parse(kind: type[V], data: Any, *, file: str = "") -> V:
    """``data`` (plain mappings, lists, numbers, text) as a ``kind``.

    Raises:
        InputError: naming the first wrong field, its value and what to write instead.
    """
    try:
        # JSON mode is strict about numbers and text, and takes a list for a tuple.
        return kind.model_validate_json(json.dumps(data, allow_nan=True))
    except ValidationError as error:
        raise _as_input_error(kind, data, error, file) from None


def _as_input_error(kind: type[BaseModel], data: Any, error: ValidationError, file: str) -> InputError:
    found = min(error.errors(), key=lambda item: _rank(item, error))
    path = [part for part in found["loc"] if not _is_union_tag(part, data)]
    field = ".".join(str(part) for part in path)
    value = _lookup(data, path)
    if found["type"] == "extra_forbidden":
        parent = _fields_at(kind, path[:-1])
        near = difflib.get_close_matches(str(path[-1]), parent, n=1)
        remedy = f"did you mean {near[0]!r}?" if near else f"known keys here: {', '.join(parent)}"
        return InputError("unknown key", remedy, field=field, value=value, file=file)
    if found["type"] == "missing":
        return InputError("missing", f"add {path[-1]!r}", field=field, file=file)
    return InputError(_problem(found), _remedy(found, value), field=field or "(whole file)", value=value, file=file)


def _rank(item: Any, error: ValidationError) -> tuple[int, int]:
    # In a union the deepest complaint belongs to the branch that was meant; unknown keys speak first.
    return (0 if item["type"] == "extra_forbidden" else 1, -len(item["loc"]))


def _is_union_tag(part: Any, data: Any) -> bool:
    """Pydantic puts the branch of a union (a class or a function's name) into the location; people don't write it."""
    text = str(part)
    return isinstance(part, str) and (text[:1].isupper() or "[" in text or text in {"bool", "int", "str", "float"})


def _lookup(data: Any, path: list[Any]) -> Any:
    for part in path:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return None
    return data


def _fields_at(kind: type[BaseModel], path: list[Any]) -> list[str]:
    current: Any = kind
    for part in path:
        field = getattr(current, "model_fields", {}).get(part)
        nested = _models_in(field.annotation) if field is not None else []
        if not nested:
            return []
        current = nested[0]
    return list(getattr(current, "model_fields", {}))


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in _models_in(part)]


def _problem(found: Any) -> str:
    message = found["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return message[:1].lower() + message[1:]


def _remedy(found: Any, value: Any) -> str:
    kind, context = found["type"], found.get("ctx", {})
    if kind in {"float_type", "int_type"} and isinstance(value, str):
        return "write the number without quotes"
    if kind.startswith("literal"):
        near = difflib.get_close_matches(str(value), str(context.get("expected", "")).replace("'", "").split(", "), n=1)
        return f"did you mean {near[0]!r}?" if near else f"use {context.get('expected', 'one of the known values')}"
    if kind in {"greater_than_equal", "greater_than"}:
        return f"write a number of at least {context.get('ge', context.get('gt'))}"
    if kind == "finite_number":
        return "write a finite number"
    return "correct it"


def canonical_json(data: Any) -> str:
    """One text for one content: sorted keys, no spaces, no NaN. What content hashes are taken of."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
