"""Techniques of installed packages: entry points of the group ``trainfit.techniques``."""

from functools import cache
from importlib.metadata import entry_points
from typing import Any

from pydantic import GetCoreSchemaHandler, ValidationError
from pydantic_core import PydanticCustomError, core_schema

GROUP = "trainfit.techniques"


@cache
def outside_techniques() -> tuple[Any, ...]:
    """Return what the entry points name, sorted by the entry points' names."""
    return tuple(point.load() for point in sorted(entry_points(group=GROUP), key=lambda point: point.name))


class Extensible:
    """Annotation of a Literal: also accept the values of this dotted field that outside techniques cover."""

    def __init__(self, field: str):
        self.field = field

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_wrap_validator_function(
            self._validate, handler(source), serialization=core_schema.simple_ser_schema("any")
        )

    def _validate(self, value: Any, literal: core_schema.ValidatorFunctionWrapHandler) -> Any:
        try:
            return literal(value)
        except ValidationError as error:
            more = [each for one in outside_techniques() for each in one.covers.get(self.field, ())]
            if any(type(value) is type(known) and value == known for known in more):
                return value
            expected = error.errors()[0].get("ctx", {}).get("expected")
            if not more or expected is None:
                raise
            known = f"{expected}, {', '.join(map(repr, more))}"
            raise PydanticCustomError(
                "literal_error", "Input should be {expected}", {"expected": known}
            ) from None
