"""The base of every noun, and the types of its fields.

A value is frozen, strict (no silent conversion of text to numbers), refuses unknown keys, NaN and infinity.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from trainfit.spec.errors import InputError
from trainfit.spec.units import read_share

FromPercent = BeforeValidator(
    lambda given: read_share(given) if isinstance(given, str) and given.strip().endswith("%") else given
)
"""Reads a share that is written in per cent, such as ``40%``."""
MOST_COUNT = 2**24
Count = Annotated[int, Field(ge=0)]
PositiveInt = Annotated[int, Field(ge=1, le=MOST_COUNT)]
"""At least 1 and at most 16,777,216: more sequences, tokens a sequence or GPUs than anyone has."""
Bytes = Annotated[int, Field(ge=0)]
Flops = Annotated[float, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0)]
"""A ratio such as MFU: 0.45 is 45 %. It may exceed 1 only where a measurement contradicts a data sheet."""


class Value(BaseModel):
    """A frozen, strict value; change it with ``model_copy(update=...)``."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with fields changed, and without cached properties, which the changes may outdate."""
        copied = super().model_copy(update=update, deep=deep)
        for name in vars(copied).keys() - type(self).model_fields.keys():
            del vars(copied)[name]
        return copied


def texts(given: Any, *, field: str, remedy: str = "write one text, or a list of texts") -> tuple[str, ...]:
    """Return an argument that takes several texts, of which one alone is a text, not its letters.

    Raises:
        InputError: neither text nor a sequence of text.
    """
    if isinstance(given, str):
        return (given,)
    if isinstance(given, Iterable) and not isinstance(given, Mapping | bytes):
        found = tuple(given)
        if all(isinstance(one, str) for one in found):
            return found
    raise InputError("should be text, or a list of text", remedy, field=field, value=given)


def disagreement(problem: str, remedy: str, *, field: str) -> PydanticCustomError:
    """Return the error of a model validator for fields that contradict each other; ``field`` is shown."""
    context = {"problem": problem, "remedy": remedy, "field": field}
    return PydanticCustomError("disagreement", "{problem}; {remedy}", context)


def canonical_json(data: Any) -> str:
    """Return the text that content hashes are taken of: sorted keys, no spaces, no NaN."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def short_hash(data: Any) -> str:
    """Return sixteen hex digits of the SHA-256 of the canonical JSON of plain ``data``."""
    return hashlib.sha256(canonical_json(data).encode()).hexdigest()[:16]
