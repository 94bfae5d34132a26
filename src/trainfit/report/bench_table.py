"""A benchmark's rows as cells, for the terminal and for the docs.

Rows that answer the same question (equal keys in their points) make one table: its columns are the keys, then the median with the
samples' spread, then the numbers, then the status where it is not done. What is the same in every row is told once, above.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from trainfit.spec.bench import BenchRow, Cell, Spread
from trainfit.spec.units import format_bytes, format_seconds

UNITS = {"tflops_per_s": "TFLOP/s", "gb_per_s": "GB/s", "set_kib": "set, KiB", "copied_mib": "copied, MiB"}
SPREAD = "spread"
"""From the 10th to the 90th percentile, over the median."""
BEYOND = " Including non-PyTorch memory"
"""What comes from here on in a message that memory ran out is advice and the process's own sums."""
STATUS = "status"
SHARE = "_share"
"""Its cells say %, so a column's title leaves it out where no other number has the name."""
SHARES = ("share", "of_a_copy", "of_data_sheet")
MEAN, DEVIATION = "_mean_s", "_std_s"
"""Two numbers of one quantity share a column: ``forward_mean_s`` and ``forward_std_s``."""


@dataclass(frozen=True)
class Grid:
    """One table: titles, lines of as many cells, which columns are numbers, and what is the same in every row."""

    titles: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    is_number: tuple[bool, ...]
    same: str
    num_keys: int = 1
    """The first columns say which line it is."""


def grids(rows: Sequence[BenchRow]) -> list[Grid]:
    """The tables of these rows, in the order in which their first rows come."""
    groups: dict[tuple[str, ...], list[BenchRow]] = {}
    for row in rows:
        groups.setdefault(tuple(row.point), []).append(row)
    return [_grid(keys, group) for keys, group in groups.items()]


def _grid(keys: tuple[str, ...], rows: list[BenchRow]) -> Grid:
    varied = [key for key in keys if len(rows) == 1 or len({row.point[key] for row in rows}) > 1]
    same = ", ".join(f"{key} {cell_text('', rows[0].point[key])}" for key in keys if key not in varied)
    columns: list[tuple[str, bool, list[str]]] = [
        (
            UNITS.get(key, key),
            not isinstance(rows[0].point[key], str | bool),
            [cell_text("", row.point[key]) for row in rows],
        )
        for key in varied
    ]
    if any(row.times for row in rows):
        cells = [_times(row.times) for row in rows]
        names = ("median", SPREAD, "samples")
        columns += [(name, True, [cell[index] for cell in cells]) for index, name in enumerate(names)]
    names = list(dict.fromkeys(name for row in rows for name in row.numbers if not name.endswith(DEVIATION)))
    quantities = {name.removesuffix("_s") for name in names}
    for name in names:
        is_text = any(isinstance(row.numbers.get(name), str) for row in rows)
        named = title(name.removesuffix(SHARE) if name.removesuffix(SHARE) not in quantities else name)
        columns.append((named, not is_text, [number_text(row, name) for row in rows]))
    if any(row.status != "done" for row in rows):
        columns.append((STATUS, False, ["" if row.status == "done" else row.status for row in rows]))
    titles, is_number, cells = zip(*columns, strict=True)
    return Grid(titles, tuple(zip(*cells, strict=True)), is_number, same, len(varied))


def number_text(row: BenchRow, name: str) -> str:
    """A row's number, with its standard deviation where it has one."""
    if name not in row.numbers:
        return ""
    text = cell_text(name, row.numbers[name])
    deviation = row.numbers.get(name.removesuffix(MEAN) + DEVIATION) if name.endswith(MEAN) else None
    return text if deviation is None else f"{text} ± {cell_text(DEVIATION, deviation)}"


def _times(times: Spread | None) -> tuple[str, str, str]:
    if times is None:
        return "", "", ""
    share = (times.high - times.low) / times.median if times.median > 0 else 0.0
    return format_seconds(times.median), f"{share:.0%}", str(len(times.samples))


def title(name: str) -> str:
    """A number's name as a column's title; units that the cells print are left out."""
    if name in UNITS:
        return UNITS[name]
    return name.removesuffix("_bytes").removesuffix(MEAN).removesuffix("_s").replace("_", " ")


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
    if name.endswith(SHARE) or name in SHARES:
        return f"{cell:.1%}"
    if isinstance(cell, int) or cell == int(cell):
        return str(int(cell))
    if abs(cell) >= 1e4:
        return f"{cell:.0f}"
    return f"{cell:.4f}" if name == "total" else f"{cell:.4g}"


def aligned(grid: Grid) -> list[str]:
    """The table as lines of text, as wide as it needs to be; a cell may have several lines."""
    rows = [[cell.split("\n") for cell in line] for line in (grid.titles, *grid.lines)]
    widths = [max(len(text) for row in rows for text in row[index]) for index in range(len(grid.titles))]
    return [
        "  ".join(
            text.rjust(width) if number else text.ljust(width)
            for text, width, number in zip(texts, widths, grid.is_number, strict=True)
        ).rstrip()
        for row in rows
        for texts in zip_longest(*row, fillvalue="")
    ]


def reasons(rows: Sequence[BenchRow]) -> list[str]:
    """Why rows are not done: each reason once, with its first point and the number of rows that it is of.

    An unsteady row's spread is in its table, so it needs no line.
    """
    points: dict[str, list[str]] = {}
    for row in rows:
        if row.status not in ("done", "unsteady"):
            point = ", ".join(f"{key} {cell_text('', cell)}" for key, cell in row.point.items())
            points.setdefault(f"{row.status}: {row.message.partition(BEYOND)[0]}", []).append(point)
    return [
        f"{why} ({found[0]}{f', and {len(found) - 1} more' if len(found) > 1 else ''})"
        for why, found in points.items()
    ]
