"""An imported configuration as text for a terminal: what ``trainfit import`` prints."""

import json
from collections.abc import Sequence
from typing import Any, get_args

from rich.console import Console
from rich.text import Text

from trainfit.report.console import broken, console, heading, rows
from trainfit.report.words import describe
from trainfit.spec.imported import Change, FieldWithoutCounterpart, Imported, TakenField
from trainfit.spec.units import format_bytes

LONGEST_VALUE = 50
MOST_IN_VERDICT = 2
LARGE = 10**6  # From here numbers are written as powers of ten.


def show(
    imported: Imported, *, taken: bool = True, verbose: bool = False, out: Console | None = None
) -> None:
    """Print the recipe in a line, and the account of the files' fields.

    Args:
        taken: also list the fields that the recipe has.
        verbose: also name the fields without influence.
        out: the console; None: standard output.
    """
    out = out or console()
    for file in imported.files:
        because = f" (by {', '.join(file.because[:3])})" if file.because else ""
        out.print(Text(f"{file.path}: {file.tool}{because}"))
    out.print()
    out.print(Text(describe(imported.recipe), style="bold"))
    out.print(Text(_counts(imported)))
    if imported.without:
        heading(out, "Without a counterpart in a recipe, so not in the prediction")
        lines = [
            [", ".join(one.changes) or "nothing", f"{_given(one.name, one.given)}: {one.note}"]
            for one in sorted(imported.without, key=_weight)
        ]
        rows(out, lines, "left", "wrap")
    if imported.unread:
        heading(out, "Not known, or not readable")
        lines = [[_joined(_given(one.name, one.given), one.note)] for one in imported.unread]
        rows(out, lines, "wrap")
    if imported.assumed:
        heading(out, "In no file: the tool's defaults, and assumptions")
        lines = [
            [_becomes(one.field, one.value) or _short(one.value), _joined(one.name, one.note)]
            for one in imported.assumed
        ]
        rows(out, lines, "wrap", "wrap")
    if imported.taken and taken:
        heading(out, "Taken")
        rows(out, [_taken(one) for one in imported.taken], "wrap", "wrap")
    if verbose:
        _names(out, "Without influence on memory, time and numbers", imported.idle)
        _names(out, "Left empty", imported.blank)


def caveat(imported: Imported, fitting: Sequence[tuple[str, int]]) -> str:
    """Return the end of a verdict: settings of the files that the memory is predicted without, and what fits.

    Args:
        fitting: changes with which the recipe fits, and the bytes on the device with each.
    """
    missing = [one for one in imported.without if "memory" in one.changes]
    missing.sort(key=lambda one: "host offload" not in one.note)  # It moves the most bytes.
    names = [f"{one.name} ({one.note.partition(':')[0]})" for one in missing]
    more = [f"{len(names) - MOST_IN_VERDICT} more"] * (len(names) > MOST_IN_VERDICT)
    named = ", ".join([*names[:MOST_IN_VERDICT], *more])
    fits = " or ".join(f"{changes} ({format_bytes(size)})" for changes, size in fitting)
    return "; ".join([f"not predicted: {named}"] * bool(names) + [f"fits with {fits}"] * bool(fits))


def _weight(one: FieldWithoutCounterpart) -> int:
    """Return the place of a field in the list: first those that change memory, then time, then numbers."""
    return next((at for at, change in enumerate(get_args(Change)) if change in one.changes), 3)


def _counts(imported: Imported) -> str:
    without = {one.name for one in imported.without}
    counts = [
        (len({one.name for one in imported.taken} - without), "taken"),
        (len(without), "without a counterpart"),
        (len(imported.unread), "not known"),
        (len(imported.idle), "without influence"),
        (len(imported.blank), "empty"),
    ]
    named = ", ".join(f"{count} {words}" for count, words in counts if count)
    return f"{imported.num_fields} fields: {named}"


def _given(name: str, value: Any) -> str:
    return name if value is None else f"{name} = {_short(value)}"


def _becomes(field: str, value: Any) -> str:
    return f"{field}: {_short(value)}" if field else ""


def _taken(one: TakenField) -> list[str]:
    """Return the recipe's field, and the tool's; its value where it differs from the recipe's."""
    given = one.name if one.given == one.value else _given(one.name, one.given)
    return [_becomes(one.field, one.value), _joined(given, one.note)]


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def _names(out: Console, title: str, names: Sequence[str]) -> None:
    if names:
        heading(out, f"{title}: {len(names)}")
        out.print(Text(broken(f"  {', '.join(names)}", out.width - 1, r"(?= )")))


def _short(value: Any) -> str:
    """Return a value as YAML writes it, cut where it is long."""
    if isinstance(value, float) and value.is_integer() and abs(value) >= LARGE:
        return f"{value:g}"
    text = value if isinstance(value, str) else json.dumps(value).replace('"', "")
    text = " ".join(text.split())
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."
