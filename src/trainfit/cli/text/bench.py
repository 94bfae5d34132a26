"""A benchmark's result as text for a terminal: several tables instead of one that is too wide, no number cut.

Values that all rows share move to the heading. If the table is still too wide, leading keys move to headings
of one table per value, long names break over lines, or columns are split over tables that repeat the keys.
The shortest result is chosen.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from trainfit.bench.harness.discovery import experiment
from trainfit.report import bench_table
from trainfit.report.bench_table import STATUS, Cells, Grid
from trainfit.report.console import broken, console, notes, rows
from trainfit.report.table import GAP
from trainfit.spec.bench import BenchResult

FEWEST_LINES = 4  # Least average number of lines of a table for each value of a key
NARROWEST = 20  # Narrowest column of broken names
LINES_PER_TABLE = 8  # Lines that a further table counts for
BREAKS = r"(?<=[ /_])"  # Where a name may break


def show(result: BenchResult) -> None:
    """Print the environment, then a table for each set of keys, then the meaning of the columns."""
    out, columns = console(), experiment(result.experiment).columns
    where = result.environment
    head = f"{result.experiment}, {result.form} form · {where.device} · torch {where.torch}"
    out.print(head, style="bold")
    if result.gpu is None:
        out.print("The catalog has no data sheet of this device, so times are not checked against its peaks.")
    for grid in bench_table.grids(result.rows, columns):
        for table in fitted(grid, out.width - GAP):
            out.print(f"\n{table.same}" if table.same else "")
            justify = ["right" if column.is_number else "left" for column in table.columns]
            rows(out, (table.titles, *table.lines), *justify, min_width=GAP + width_of(table))
    notes(out, "Rows without a result", bench_table.reasons(result.rows))
    notes(out, "Columns", bench_table.notes(result.rows, columns))
    counts = Counter(row.status for row in result.rows)
    statuses = ", ".join(f"{count} {status}" for status, count in counts.items())
    out.print(f"\n{result.elapsed_s:.1f} s; rows: {statuses}")


def fitted(grid: Grid, width: int) -> list[Grid]:
    """Return the table as tables of at most ``width`` characters, unless a key and one number exceed it."""
    if width_of(grid) <= width:
        return [grid]
    choices = [way for tables in _in_headings(grid) for way in _ways(tables, width)]
    fit = [tables for tables in choices if all(width_of(table) <= width for table in tables)]
    return min(fit or choices, key=_length)


def _ways(tables: list[Grid], width: int) -> Iterator[list[Grid]]:
    """Yield the tables as they are, with names broken, and with their columns split."""
    yield tables
    yield [_with_broken_names(table, width) for table in tables]
    yield [part for table in tables for part in _split(table, width)]


def _length(tables: list[Grid]) -> int:
    """Return the lines of the tables, plus a cost for each."""
    lines = [line for table in tables for line in (table.titles, *table.lines)]
    return sum(1 + max(cell.count("\n") for cell in line) for line in lines) + LINES_PER_TABLE * len(tables)


def width_of(grid: Grid) -> int:
    """Return the width in characters."""
    return sum(map(_width, grid.columns)) + GAP * (len(grid.columns) - 1)


def _width(column: Cells) -> int:
    return max(len(text) for cell in (column.title, *column.cells) for text in cell.split("\n"))


def _lines(columns: Iterable[Cells], numbers: Sequence[int]) -> list[Cells]:
    return [column._replace(cells=[column.cells[number] for number in numbers]) for column in columns]


def _in_headings(grid: Grid) -> Iterator[list[Grid]]:
    """Yield the table with none, one, two ... of its keys in headings, while each keeps enough lines."""
    grid = _with_heading(grid, range(len(grid.lines)))
    yield [grid]
    for count in range(1, grid.num_keys):
        groups: dict[tuple[str, ...], list[int]] = {}
        for number, line in enumerate(grid.lines):
            groups.setdefault(line[:count], []).append(number)
        if len(grid.lines) / len(groups) < FEWEST_LINES:
            return
        yield [_with_heading(grid, numbers) for numbers in groups.values()]


def _with_heading(grid: Grid, numbers: Sequence[int]) -> Grid:
    """Return some lines of a table: equal cells go into the heading, empty columns are left out."""
    same, stays, num_keys = [grid.same] if grid.same else [], [], 0
    for index, column in enumerate(_lines(grid.columns, numbers)):
        if len(set(column.cells)) > 1 or len(numbers) == 1:
            stays.append(column)
            num_keys += index < grid.num_keys
        elif column.cells[0]:
            same.append(f"{column.title} {column.cells[0]}")
    return Grid(stays, ", ".join(same), num_keys)


def _with_broken_names(grid: Grid, width: int) -> Grid:
    """Return the table with its widest text column broken over lines."""
    widest = max((one for one in grid.columns if not one.is_number), key=_width, default=None)
    if widest is None or (room := _width(widest) - (width_of(grid) - width)) < NARROWEST:
        return grid
    narrow = widest._replace(cells=[broken(cell, room, BREAKS) for cell in widest.cells])
    return replace(grid, columns=[narrow if one is widest else one for one in grid.columns])


def _split(grid: Grid, width: int) -> list[Grid]:
    """Split the columns over several tables, keys in each; lines without a number are left out.

    The status (the last column, where not all are done) is in the first table.
    """
    keys, rest = list(grid.columns[: grid.num_keys]), list(grid.columns[grid.num_keys :])
    if rest and rest[-1].title == STATUS:
        rest.insert(0, rest.pop())
    groups: list[list[Cells]] = [[]]
    for column in rest:
        if groups[-1] and width_of(replace(grid, columns=[*keys, *groups[-1], column])) > width:
            groups.append([])
        groups[-1].append(column)
    tables: list[Grid] = []
    for group in groups:
        numbers = [
            number
            for number in range(len(grid.lines))
            if any(column.cells[number] for column in group)
            or (not tables and not any(column.cells[number] for column in rest))
        ]
        same = f"{grid.same} (continued)".strip() if tables else grid.same
        tables.append(Grid(_lines([*keys, *group], numbers), same, grid.num_keys))
    return tables
