"""Optional packages, imported on use; techniques of other installed packages (``trainfit.techniques``)."""

import importlib
import importlib.util
from functools import cache
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

from pydantic import GetCoreSchemaHandler, ValidationError
from pydantic_core import PydanticCustomError, core_schema

from trainfit.spec.errors import InputError

GROUP = "trainfit.techniques"


def optional(module: str, extra: str, *, field: str = "", value: object = None) -> ModuleType:
    """Import ``module`` of a package that only the extra of pyproject.toml installs.

    Raises:
        InputError: it is not installed, or cannot be imported; names the ``field`` and value that need it.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == package
        why = "is not installed" if missing else f"cannot be imported ({error})"
        raise _refusal(package, extra, why, field, value) from error


def require(package: str, extra: str, *, field: str = "", value: object = None) -> None:
    """Raise an InputError if the package is not installed; it is not imported."""
    if not is_installed(package):
        raise _refusal(package, extra, "is not installed", field, value)


def is_installed(package: str) -> bool:
    """Return whether the top-level ``package`` can be found; it is not imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # An import hook refuses it, or it is half-imported.
        return False


def _refusal(package: str, extra: str, why: str, field: str, value: object) -> InputError:
    problem = f"needs the package {package}, which {why}"
    return InputError(problem, f"pip install 'trainfit[{extra}]'", field=field, value=value)


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
