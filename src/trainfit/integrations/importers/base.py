"""What an importer is, and the draft that importers fill.

An importer reads every field of its tool's file through a ``Reading``. Each field ends in one list of the
draft: taken, without counterpart, idle, blank, or, where the importer does not ask for it, unread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from trainfit.integrations.importers.calls import CALLEE, POSITIONAL, NotLiteral
from trainfit.integrations.importers.source import Source
from trainfit.spec.errors import InputError
from trainfit.spec.imported import (
    AssumedValue,
    Change,
    FieldWithoutCounterpart,
    TakenField,
    UnreadField,
)

T = TypeVar("T")
TRUE, FALSE = ("true", "yes", "on"), ("false", "no", "off")
AT_RUN_TIME = "its value is only known when the script runs"
NOTHING = (None, "", [], {})
OFF = (False, 0, "", "no", "none", "None", "false", "False", "off", None, [], {})
"""Values with which a field of the tool changes nothing."""


@dataclass(frozen=True)
class Importer:
    """The reader of one tool's configuration. A module of ``tools`` declares it as ``IMPORTER``.

    Attributes:
        marks: fields (dotted), or called objects of a Python file (``Name()``), by which a file is
            recognised. The tool with the most of them in the file is chosen.
        read: fills the draft from a file.
        order: of several files the lowest is read first; what it states is not changed by the others.
        includes: tools whose fields stand in this tool's files too, so that their marks do not count.
        alone: no second file of an importer that is alone can be given with it.
    """

    name: str
    title: str
    marks: frozenset[str]
    read: Callable[[Reading], None]
    order: int = 10
    includes: tuple[str, ...] = ()
    alone: bool = True


@dataclass(frozen=True)
class Fact:
    """A value that decides a recipe's fields together with others, and where it stands."""

    value: Any
    name: str
    given: Any
    is_stated: bool = True


@dataclass
class Draft:
    """The recipe in the making, and the account of the fields.

    Attributes:
        count: number of GPUs that the user names; None: the files decide.
        facts: values that several fields of a recipe depend on, such as the dtype of the weights.
        referred: further files that a field names, with the tool they belong to.
        first: path of the first file; fields of others begin with the name of their file.
        tools: names of the tools of the files that the user gave.
    """

    count: int | None = None
    first: str = ""
    tools: frozenset[str] = frozenset()
    data: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Fact] = field(default_factory=dict)
    taken: list[TakenField] = field(default_factory=list)
    assumed: list[AssumedValue] = field(default_factory=list)
    without: list[FieldWithoutCounterpart] = field(default_factory=list)
    unread: list[UnreadField] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)
    blank: list[str] = field(default_factory=list)
    referred: list[tuple[Source, str]] = field(default_factory=list)

    def value(self, dotted: str) -> Any:
        """Return the value of a recipe's field as set so far; None: it is not set."""
        found: Any = self.data
        for part in dotted.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return found

    def set(self, dotted: str, value: Any) -> None:
        """Set a recipe's field."""
        *outer, last = dotted.split(".")
        inner = self.data
        for part in outer:
            inner = inner.setdefault(part, {})
        inner[last] = value

    def remove(self, dotted: str) -> None:
        """Leave a recipe's field at its default."""
        *outer, last = dotted.split(".")
        inner: Any = self.data
        for part in outer:
            inner = inner.get(part, {})
        if isinstance(inner, dict):
            inner.pop(last, None)

    def forget(self, dotted: str) -> None:
        """Leave a recipe's field unset, and unlisted where it was assumed: something else states it."""
        self.remove(dotted)
        self.assumed = [one for one in self.assumed if one.field != dotted]
        self.taken = [one for one in self.taken if one.field != dotted]

    def replace(self, dotted: str, value: Any, note: str) -> None:
        """Set a recipe's field to the nearest that runs here; the fields that set it are listed."""
        for one in self.taken:
            if one.field == dotted:
                self.leave(one.name, one.given, ("memory", "time"), note)
        self.forget(dotted)
        self.assume("", dotted, value, "the nearest")

    def take(self, name: str, given: Any, dotted: str, value: Any, note: str = "") -> None:
        """Set a recipe's field from a tool's; what another field has set stays, and this is listed."""
        before = self.value(dotted)
        if before is not None and before != value and not any(one.field == dotted for one in self.assumed):
            note = f"another field has set {dotted}: {shown(before)}"
            self.leave(name, given, ("memory", "time"), note)
            return
        self.assumed = [one for one in self.assumed if one.field != dotted]
        self.set(dotted, value)
        self.taken.append(
            TakenField(name=name, given=shown(given), field=dotted, value=shown(value), note=note)
        )

    def assume(self, name: str, dotted: str, value: Any, note: str = "") -> None:
        """Set a recipe's field that nothing has set, to a default of the tool."""
        if self.value(dotted) is None:
            self.set(dotted, value)
            self.assumed.append(AssumedValue(name=name, field=dotted, value=shown(value), note=note))

    def suppose(self, name: str, value: Any, note: str) -> None:
        """List something assumed that sets no field of the recipe by itself."""
        self.assumed.append(AssumedValue(name=name, field="", value=shown(value), note=note))

    def leave(self, name: str, given: Any, changes: Iterable[Change], note: str) -> None:
        """List a field that has no counterpart."""
        one = FieldWithoutCounterpart(name=name, given=shown(given), changes=tuple(changes), note=note)
        self.without.append(one)

    def know(self, key: str, value: Any, name: str, given: Any = None, *, is_stated: bool = True) -> None:
        """Note a fact; one that is stated replaces one that is a default, and the first stated one stays."""
        before = self.facts.get(key)
        if before is None or (is_stated and not before.is_stated):
            self.facts[key] = Fact(value, name, given, is_stated)
        elif is_stated and before.value != value:
            self.leave(name, given, ("memory", "time"), f"{before.name} = {shown(before.given)} comes first")
        elif is_stated:
            self.idle.append(name)

    def fact(self, key: str) -> Any:
        """Return the value of a fact; None: nothing is known."""
        return self.facts[key].value if key in self.facts else None


class Reading:
    """One mapping of a tool's file. Reading a field accounts for it; ``finish`` lists those not read.

    Args:
        values: field -> value.
        prefix: of the fields' names, such as ``fsdp_config.``.
    """

    def __init__(self, source: Source, draft: Draft, values: Mapping[str, Any], prefix: str = ""):
        self.source, self.draft, self.prefix = source, draft, prefix
        self.values = {key: value for key, value in values.items() if key not in (CALLEE, POSITIONAL)}
        self.callee = str(values.get(CALLEE, ""))
        self.positional = list(values.get(POSITIONAL, []))
        self._accounted: set[str] = set()
        for key, value in self.values.items():
            if value in NOTHING and not isinstance(value, bool | int | float):
                self._accounted.add(key)
                draft.blank.append(self.full(key))
            elif isinstance(value, NotLiteral):
                self._accounted.add(key)
                draft.unread.append(UnreadField(name=self.full(key), given=value.text, note=AT_RUN_TIME))

    def full(self, name: str) -> str:
        """Return a field's whole name, with its file's unless that is the first."""
        path = self.source.path
        file = f"{Path(path).name}: " if self.draft.first not in ("", path) else ""
        return f"{file}{self.prefix}{name}"

    def has(self, name: str) -> bool:
        """Return whether the field is there with a value that can be read."""
        value = self.values.get(name)
        filled = value not in NOTHING or isinstance(value, bool | int | float)
        return (
            name in self.values and filled and not isinstance(value, NotLiteral) and not _is_plain_call(value)
        )

    def is_open(self, name: str) -> bool:
        """Return whether the field has a value that nothing has accounted for."""
        return self.has(name) and name not in self._accounted

    def first(self, *names: str) -> str:
        """Return the first of a field's names (of several versions) that the file has, else the first."""
        return next((name for name in names if self.has(name)), names[0])

    def error(self, name: str, expected: str, remedy: str) -> InputError:
        """Return the refusal of a field's value."""
        given = shown(self.values.get(name))
        field, file = f"{self.prefix}{name}", self.source.path
        return InputError(f"should be {expected}", remedy, field=field, value=given, file=file)

    # Values of a field by kind; None or the default where the field is not there.

    def raw(self, name: str, default: Any = None) -> Any:
        """Return a field's value as it is, without accounting for it."""
        return self.values[name] if self.has(name) else default

    def whole(self, name: str, default: Any = None, *, at_least: int = 1) -> Any:
        """Return a whole number; text such as ``"8"`` and a float such as 1e3 count."""
        found = self.number(name, None)
        if found is None:
            return default
        if found != int(found) or found < at_least:
            raise self.error(name, f"a whole number of at least {at_least}", "correct it")
        return int(found)

    def number(self, name: str, default: Any = None) -> Any:
        """Return a number; YAML 1.1 reads ``2e-5`` as text, so text counts."""
        value = self.raw(name)
        if value is None:
            return default
        try:
            found = float(value) if isinstance(value, int | float | str) else math.nan
        except (ValueError, OverflowError):
            found = math.nan
        if isinstance(value, bool) or not math.isfinite(found):
            raise self.error(name, "a number", "correct it")
        return found

    def flag(self, name: str, default: Any = None) -> Any:
        """Return true or false; the words of YAML 1.1 (yes, no, on, off) count."""
        value = self.raw(name)
        if value is None:
            return default
        word = str(value).strip().lower()
        if word in (*TRUE, "1"):
            return True
        if word in (*FALSE, "0", "none", "null"):
            return False
        raise self.error(name, "true or false", "correct it")

    def text(self, name: str, default: Any = None) -> Any:
        """Return text; of a call such as ``torch.optim.AdamW`` or a torch dtype its name."""
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, bool | dict | list):
            raise self.error(name, "text", "correct it")
        return str(value)

    def word(self, name: str, default: Any = None) -> Any:
        """Return text in lower case, ``-`` as ``_``; true and false as words."""
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, dict | list):
            raise self.error(name, "one word", "correct it")
        return str(value).strip().lower().replace("-", "_")

    def texts(self, name: str, default: Any = None) -> Any:
        """Return a list of text; one text stands for a list, at its commas where there are any."""
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, str):
            return [part.strip() for part in value.split(",") if part.strip()]
        if isinstance(value, list) and all(isinstance(one, str) for one in value):
            return list(value)
        raise self.error(name, "text, or a list of text", "correct it")

    def mapping(self, name: str) -> Mapping[str, Any]:
        """Return a field's mapping; empty where it is not there."""
        value = self.values.get(name) or {}
        if isinstance(value, NotLiteral):
            return {}
        if not isinstance(value, Mapping):
            raise self.error(name, "a mapping", "write its keys below it")
        return value

    def inside(self, name: str, *, prefix: str | None = None) -> Reading:
        """Return the reading of a field's mapping, whose fields are accounted for by themselves."""
        self._accounted.add(name)
        at = f"{self.prefix}{name}." if prefix is None else prefix
        return Reading(self.source, self.draft, self.mapping(name), at)

    # Accounting

    def accounted(self, *names: str) -> None:
        """Count fields as read."""
        self._accounted.update(names)

    def take(self, name: str, dotted: str, value: Any, note: str = "") -> None:
        """Set a recipe's field from a field that the file has."""
        self._accounted.add(name)
        self.draft.take(self.full(name), self.values.get(name), dotted, value, note)

    def take_or_assume(self, name: str, dotted: str, value: Any, note: str = "", why: str = "") -> None:
        """Set a recipe's field: taken where the file has the field, else the tool's default.

        Args:
            note: on the value that is taken.
            why: on the value that is assumed.
        """
        if self.has(name):
            self.take(name, dotted, value, note)
        else:
            self.draft.assume(self.full(name), dotted, value, why)

    def know(self, key: str, value: Any, name: str) -> None:
        """Note a fact from a field: stated where the file has the field, else the tool's default."""
        self._accounted.add(name)
        given = self.values.get(name) if self.has(name) else value
        self.draft.know(key, value, self.full(name), given, is_stated=self.has(name))

    def leave(self, name: str, changes: Iterable[Change], note: str, *, off: Iterable[Any] = OFF) -> None:
        """List a field that has no counterpart, unless it has a value that changes nothing."""
        if not self.has(name) or name in self._accounted:
            return
        self._accounted.add(name)
        value = self.values[name]
        if any(type(one) is type(value) and one == value for one in off):
            self.draft.idle.append(self.full(name))
        else:
            self.draft.leave(self.full(name), value, changes, note)

    def idle(self, names: Iterable[str], *, prefixes: Iterable[str] = ()) -> None:
        """Count fields as without influence; ``prefixes`` are beginnings of names, such as ``wandb_``."""
        wanted, starts = frozenset(names), tuple(prefixes)
        for name in self.values:
            if name not in self._accounted and (name in wanted or (starts and name.startswith(starts))):
                self._accounted.add(name)
                self.draft.idle.append(self.full(name))

    def finish(self) -> None:
        """List the fields that nothing has read."""
        for name, value in self.values.items():
            if name not in self._accounted:
                self._accounted.add(name)
                note = AT_RUN_TIME if _is_plain_call(value) else ""
                self.draft.unread.append(UnreadField(name=self.full(name), given=shown(value), note=note))


def _is_plain_call(value: Any) -> bool:
    """Return whether a value is the call of a function, such as ``int(...)``, and not of a class."""
    return isinstance(value, Mapping) and str(value.get(CALLEE, "")).rpartition(".")[2][:1].islower()


def shown(value: Any) -> Any:
    """Return a value as JSON holds it: what it cannot hold as text."""
    if isinstance(value, NotLiteral):
        return value.text
    if isinstance(value, Mapping) and CALLEE in value:
        return f"{value[CALLEE]}(...)"
    if isinstance(value, Mapping):
        return {str(key): shown(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [shown(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 1024:
        return "a number that is too long"
    return value
