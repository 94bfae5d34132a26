"""Another tool's configuration as a recipe: what became of each of its fields."""

from typing import Literal

from pydantic import JsonValue

from trainfit.spec.recipe import Recipe
from trainfit.spec.value import Value

Change = Literal["memory", "time", "numbers"]
"""What a field would change: the peak, a step's time, or the mathematics."""


class ConfigFile(Value):
    """A file that was read.

    Attributes:
        because: the fields by which the tool was recognised; empty where the tool was given.
    """

    path: str
    tool: str
    because: tuple[str, ...] = ()


class TakenField(Value):
    """A field of the tool, and the field of the recipe that says the same."""

    name: str
    given: JsonValue
    field: str
    value: JsonValue
    note: str = ""


class AssumedValue(Value):
    """A value that no file states.

    Attributes:
        name: the tool's field, with its default in the tool; empty where the tool has none.
    """

    name: str
    field: str
    value: JsonValue
    note: str = ""


class FieldWithoutCounterpart(Value):
    """A field of the tool that no field of a recipe can say, and what it would change."""

    name: str
    given: JsonValue
    changes: tuple[Change, ...]
    note: str


class UnreadField(Value):
    """A field that the importer does not know, or whose value it cannot read."""

    name: str
    given: JsonValue
    note: str = ""


class Imported(Value):
    """A recipe made of other tools' files, with an account of every field in them.

    Attributes:
        idle: fields without influence on memory, time or numbers of a step, such as those of logging.
        blank: fields that are there without a value.
    """

    files: tuple[ConfigFile, ...]
    recipe: Recipe
    taken: tuple[TakenField, ...] = ()
    assumed: tuple[AssumedValue, ...] = ()
    without: tuple[FieldWithoutCounterpart, ...] = ()
    unread: tuple[UnreadField, ...] = ()
    idle: tuple[str, ...] = ()
    blank: tuple[str, ...] = ()

    @property
    def num_fields(self) -> int:
        """Number of fields in the files, each counted once."""
        named = {one.name for one in (*self.taken, *self.without, *self.unread)}
        return len(named | {*self.idle, *self.blank})
