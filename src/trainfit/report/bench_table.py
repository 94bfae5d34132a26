"""A benchmark's rows as cells, for the terminal and for the docs.

Rows that answer the same question (equal keys in their points) make one table: its columns are the keys, then the median with the
samples' spread, then the numbers, then the status where it is not done.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trainfit.spec.bench import BenchRow, Cell
from trainfit.spec.samples import Spread
from trainfit.spec.units import format_bytes, format_seconds

UNITS = {"tflops_per_s": "TFLOP/s", "gb_per_s": "GB/s"}


SPREAD = "spread"
"""From the 10th to the 90th percentile, over the median."""


@dataclass(frozen=True)
class Grid:
    """One table: titles, and lines of as many cells."""

    titles: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    is_number: tuple[bool, ...]


def grids(rows: Sequence[BenchRow]) -> list[Grid]:
    """The tables of these rows, in the order in which their first rows come."""
    groups: dict[tuple[str, ...], list[BenchRow]] = {}
    for row in rows:
        groups.setdefault(tuple(row.point), []).append(row)
    return [_grid(keys, group) for keys, group in groups.items()]


def _grid(keys: tuple[str, ...], rows: list[BenchRow]) -> Grid:
    names = list(dict.fromkeys(name for row in rows for name in row.numbers))
    titles, numeric = list(keys), [not isinstance(rows[0].point[key], str) for key in keys]
    if timed := any(row.times for row in rows):
        titles += ["median", SPREAD, "samples"]
        numeric += [True] * 3
    titles += [title(name) for name in names]
    numeric += [not any(isinstance(row.numbers.get(name), str) for row in rows) for name in names]
    if noted := any(row.status != "done" for row in rows):
        titles.append("status")
        numeric.append(False)
    lines = []
    for row in rows:
        line = [cell_text("", row.point[key]) for key in keys]
        line += _times(row.times) if timed else []
        line += [cell_text(name, row.numbers[name]) if name in row.numbers else "" for name in names]
        line += ["" if row.status == "done" else row.status] if noted else []
        lines.append(tuple(line))
    return Grid(tuple(titles), tuple(lines), tuple(numeric))


def _times(times: Spread | None) -> list[str]:
    if times is None:
        return ["", "", ""]
    share = (times.high - times.low) / times.median if times.median > 0 else 0.0
    return [format_seconds(times.median), f"{share:.0%}", str(len(times.samples))]


def title(name: str) -> str:
    """A number's name as a column's title; units that the cells print are left out."""
    if name in UNITS:
        return UNITS[name]
    return name.removesuffix("_bytes").removesuffix("_s").replace("_", " ")


def cell_text(name: str, cell: Cell) -> str:
    """A cell for people, by the unit that its name ends with."""
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, str):
        return cell
    if name.endswith("_bytes"):
        return format_bytes(cell)
    if name.endswith("_s") and not name.endswith("_per_s"):
        return format_seconds(cell)
    return str(cell) if isinstance(cell, int) else f"{cell:.4f}" if 1 <= abs(cell) < 100 else f"{cell:.4g}"


def reasons(rows: Sequence[BenchRow]) -> list[str]:
    """Why rows are not done: each reason once, with its first point and the number of rows that it is of.

    An unsteady row's spread is in its table, so it needs no line.
    """
    points: dict[str, list[str]] = {}
    for row in rows:
        if row.status not in ("done", "unsteady"):
            point = ", ".join(f"{key} {cell_text('', cell)}" for key, cell in row.point.items())
            points.setdefault(f"{row.status}: {row.message}", []).append(point)
    return [
        f"{why} ({found[0]}{f', and {len(found) - 1} more' if len(found) > 1 else ''})"
        for why, found in points.items()
    ]
