"""Tables of fitted numbers: each a row of its value, its unit and the fit that it comes from.

A fit is a row of ``[fits]`` in the same file: the command that makes it, on what, and how far off it was.
"""

import functools
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from trainfit.spec.errors import InputError
from trainfit.spec.parsing.parse import parse
from trainfit.spec.value import Value

FITS = "fits"


class Fit(Value):
    """Origin of fitted numbers."""

    command: str = ""
    """Makes the fit again, or compares it with measurements; empty: an assumption, or no command is kept."""
    of: str
    """Measurements that it was made of."""
    error: str
    """How far off what is computed with it was, or that this was not measured."""


class FittedRow(NamedTuple):
    """One number (or several that were fitted together) with its origin."""

    name: str  # With the names of its tables, such as ``host.forward``
    value: Any
    unit: str
    fit: Fit


class FittedTable(NamedTuple):
    """A file's numbers: their values alone, in its tables, and their rows."""

    values: dict[str, Any]
    rows: tuple[FittedRow, ...]


@functools.cache
def fitted_table(path: Path) -> FittedTable:
    """Return the numbers of a file; a text, such as the name of a GPU, stands without a row.

    Raises:
        InputError: a number without value, unit and fit, or of a fit that the file does not have.
    """
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    fits = {
        name: parse(Fit, row, file=f"{path.name} [{FITS}.{name}]") for name, row in table.pop(FITS).items()
    }
    rows: list[FittedRow] = []

    def values_of(part: dict[str, Any], within: str = "") -> dict[str, Any]:
        return {key: value_of(f"{within}{key}", row) for key, row in part.items()}

    def value_of(name: str, row: object) -> Any:
        if isinstance(row, str):
            return row
        if isinstance(row, dict) and "value" not in row:
            return values_of(row, f"{name}.")
        if not isinstance(row, dict) or row.keys() != {"value", "unit", "fit"}:
            remedy = "write a row of value, unit and fit"
            raise InputError("no row of a fitted number", remedy, field=name, value=row, file=path.name)
        if row["fit"] not in fits:
            remedy = f"name one of {', '.join(fits)}"
            raise InputError("no such fit", remedy, field=f"{name}.fit", value=row["fit"], file=path.name)
        rows.append(FittedRow(name, row["value"], row["unit"], fits[row["fit"]]))
        return row["value"]

    return FittedTable(values_of(table), tuple(rows))
