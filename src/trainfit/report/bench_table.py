"""Tables of a benchmark's rows, from the columns that its experiment declares.

Rows with the same keys in their points make one table: keys, then median, spread and number of samples, then
the declared numbers, then the status where a row is not done. A key with one value throughout goes into the
heading.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trainfit.bench.harness.experiment import Column
from trainfit.report.words import quantity
from trainfit.spec.bench import BenchRow, Cell, Spread
from trainfit.spec.units import format_seconds

STATUS = "status"
TIMES = ("median", "spread", "samples")
SPREAD_NOTE = "spread: from the samples' 10th to their 90th percentile, over the median"
UNSTEADY_NOTE = (
    "unsteady: the time cap was reached before the median was as precise as the experiment requires"
)
DEVIATION_NOTE = "a ± b: mean and standard deviation of the samples"
ADVICE = " Including non-PyTorch memory"  # An out-of-memory message is cut here: what follows is advice


class Cells(NamedTuple):
    """One column."""

    title: str
    is_number: bool
    cells: Sequence[str]


@dataclass(frozen=True)
class Grid:
    """Cells of one table."""

    columns: Sequence[Cells]
    same: str  # Heading, with the keys that have one value throughout
    num_keys: int = 1  # Leading columns that identify a line

    @property
    def lines(self) -> list[tuple[str, ...]]:
        return list(zip(*(column.cells for column in self.columns), strict=True))

    @property
    def titles(self) -> tuple[str, ...]:
        return tuple(column.title for column in self.columns)


def grids(rows: Sequence[BenchRow], columns: Sequence[Column] = ()) -> list[Grid]:
    """Return the tables of ``rows``; numbers without a declared column come last, under their own names."""
    groups: dict[tuple[str, ...], list[BenchRow]] = {}
    for row in rows:
        groups.setdefault(tuple(row.point), []).append(row)
    declared = {column.value: column for column in columns}
    return [_grid(keys, group, declared) for keys, group in groups.items()]


def _grid(keys: tuple[str, ...], rows: list[BenchRow], declared: dict[str, Column]) -> Grid:
    def column_of(name: str) -> Column:
        return declared.get(name, Column(name))

    varied = [key for key in keys if len(rows) == 1 or len({row.point[key] for row in rows}) > 1]
    same = [f"{title(column_of(key))} {cell_text(rows[0].point[key])}" for key in keys if key not in varied]
    table = [
        Cells(title(column_of(key)), not isinstance(rows[0].point[key], str | bool),
              [cell_text(row.point[key]) for row in rows])
        for key in varied
    ]  # fmt: skip
    if any(row.times for row in rows):
        table += map(Cells, TIMES, (True,) * 3, zip(*(_times(row.times) for row in rows), strict=True))
    names = dict.fromkeys(name for row in rows for name in row.numbers)
    deviations = {column.deviation for column in declared.values()}
    for name in dict.fromkeys([*(name for name in declared if name in names), *names]):
        if name not in deviations:
            is_text = any(isinstance(row.numbers.get(name), str) for row in rows)
            texts = [_number_text(row, column_of(name)) for row in rows]
            table.append(Cells(title(column_of(name)), not is_text, texts))
    if any(row.status != "done" for row in rows):
        table.append(Cells(STATUS, False, ["" if row.status == "done" else row.status for row in rows]))
    return Grid(table, ", ".join(same), len(varied))


def title(column: Column) -> str:
    """Return a column's heading; units that its cells show are left out."""
    name = column.value.removesuffix("_bytes").removesuffix("_s").removesuffix("_share")
    return column.title or name.replace("_", " ")


def _number_text(row: BenchRow, column: Column) -> str:
    """Return a row's number, with its standard deviation where there is one; empty where it has none."""
    names = [name for name in (column.value, column.deviation) if name in row.numbers]
    texts = [cell_text(row.numbers[name], name, column.format) for name in names]
    return " ± ".join(texts) if column.value in names else ""


def cell_text(cell: Cell, name: str = "", spec: str = "") -> str:
    """Format a cell by ``spec``, or by the unit that ``name`` ends with."""
    if isinstance(cell, bool | str):
        return cell if isinstance(cell, str) else "yes" if cell else "no"
    if spec or name.endswith("_share"):
        return format(cell, spec or ".1%")
    if name.endswith(("_bytes", "_s")) and not name.endswith("_per_s"):
        return quantity(name, cell)
    if cell == int(cell):
        return str(int(cell))
    return f"{cell:.0f}" if abs(cell) >= 1e4 else f"{cell:.4g}"


def _times(times: Spread | None) -> tuple[str, str, str]:
    if times is None:
        return "", "", ""
    spread = (times.high - times.low) / times.median if times.median > 0 else 0.0
    return format_seconds(times.median), f"{spread:.0%}", str(len(times.samples))


def reasons(rows: Sequence[BenchRow]) -> list[str]:
    """Return why rows have no result: each reason once, with its first point and a count of the others."""
    points: dict[str, list[str]] = {}
    for row in rows:
        if row.status not in ("done", "unsteady"):
            point = ", ".join(f"{key} {cell_text(cell)}" for key, cell in row.point.items())
            points.setdefault(f"{row.status}: {row.message.partition(ADVICE)[0]}", []).append(point)
    more = {why: f", and {len(found) - 1} more" if len(found) > 1 else "" for why, found in points.items()}
    return [f"{why} ({found[0]}{more[why]})" for why, found in points.items()]


def notes(rows: Sequence[BenchRow], columns: Sequence[Column]) -> list[str]:
    """Return the meaning of each column and status that the rows' tables show."""
    known = {name for row in rows for name in (*row.point, *row.numbers)}
    general = {
        SPREAD_NOTE: any(row.times for row in rows),
        DEVIATION_NOTE: any(column.deviation in known for column in columns),
        UNSTEADY_NOTE: any(row.status == "unsteady" for row in rows),
    }
    noted = [f"{title(one)}: {one.note}" for one in columns if one.note and one.value in known]
    return [note for note, applies in general.items() if applies] + noted
