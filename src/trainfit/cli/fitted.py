"""A benchmark's table for a terminal of so many columns: what does not fit is told in several tables, and no number is cut.

What is the same in every line goes into the heading. Then leading keys may go there, with a table for each of their values; long names
may break over lines; columns may be dealt out over several tables, each with the keys: whatever is the shortest to read.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from trainfit.report.bench_table import STATUS, Grid, aligned

FEWEST_LINES = 4
"""A table for each value of a key has on average at least so many lines."""
NARROWEST = 20
"""Names are not broken into shorter pieces."""
A_TABLE = 8
"""A further table is as much to read as so many lines."""
PIECE = re.compile(r"[^ /_]*[ /_]|[^ /_]+")
"""What a name may break after."""


def fitted(grid: Grid, width: int) -> list[Grid]:
    """The table as tables of at most ``width`` columns; one is wider only where a key and a single number are."""
    if width_of(grid) <= width:
        return [grid]
    choices = [way for tables in _in_headings(grid) for way in _ways(tables, width)]
    fit = [tables for tables in choices if all(width_of(table) <= width for table in tables)]
    return min(fit or choices, key=_length)


def _ways(tables: list[Grid], width: int) -> Iterator[list[Grid]]:
    """As they are, with names broken, and with their columns dealt out."""
    yield tables
    yield [_with_broken_names(table, width) for table in tables]
    yield [part for table in tables for part in _dealt_out(table, width)]


def _length(tables: list[Grid]) -> int:
    """How long they are to read: lines, and what it takes to find one's way into another table."""
    return sum(len(aligned(table)) + A_TABLE for table in tables)


def width_of(grid: Grid) -> int:
    """Columns that it takes."""
    return max(len(line) for line in aligned(grid))


def _in_headings(grid: Grid) -> Iterator[list[Grid]]:
    """The table with none of its varied keys in headings, with the first, the first two, while enough lines are left in each."""
    grid = _told_above(grid, grid.lines)
    yield [grid]
    for count in range(1, grid.num_keys):
        groups: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
        for line in grid.lines:
            groups.setdefault(line[:count], []).append(line)
        if len(grid.lines) / len(groups) < FEWEST_LINES:
            return
        yield [_told_above(grid, lines) for lines in groups.values()]


def _told_above(grid: Grid, lines: Sequence[tuple[str, ...]]) -> Grid:
    """Some lines of a table: what is the same in all of several goes above, columns that are empty in all are left out."""
    same, stays = [grid.same] if grid.same else [], []
    for index, title in enumerate(grid.titles):
        cells = {line[index] for line in lines}
        if len(cells) > 1 or len(lines) == 1:
            stays.append(index)
        elif cells != {""}:
            same.append(f"{title} {lines[0][index]}")
    return replace(_columns(grid, stays, lines), same=", ".join(same))


def _columns(grid: Grid, indices: Sequence[int], lines: Sequence[tuple[str, ...]]) -> Grid:
    return Grid(
        tuple(grid.titles[index] for index in indices),
        tuple(tuple(line[index] for index in indices) for line in lines),
        tuple(grid.is_number[index] for index in indices),
        grid.same,
        sum(index < grid.num_keys for index in indices),
    )


def _with_broken_names(grid: Grid, width: int) -> Grid:
    """The widest column of words broken over lines, as narrow as the table needs it."""
    widths = [max(map(len, cells)) for cells in zip(grid.titles, *grid.lines, strict=True)]
    words = [index for index, number in enumerate(grid.is_number) if not number]
    widest = max(words, key=lambda index: widths[index], default=-1)
    if widest < 0 or (room := widths[widest] - (width_of(grid) - width)) < NARROWEST:
        return grid
    lines = [(*line[:widest], broken(line[widest], room), *line[widest + 1 :]) for line in grid.lines]
    return replace(grid, lines=tuple(lines))


def broken(text: str, width: int) -> str:
    """The text on lines of at most ``width``, broken after spaces, slashes and underscores; a longer piece stays whole."""
    lines = [""]
    for piece in PIECE.findall(text):
        if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)


def _dealt_out(grid: Grid, width: int) -> list[Grid]:
    """The columns over as many tables as they need, keys in each; a line is left out where it has nothing to tell.

    How a line ended (the last column, where not all are done) stands in the first table.
    """
    keys, rest = list(range(grid.num_keys)), list(range(grid.num_keys, len(grid.titles)))
    if rest and grid.titles[rest[-1]] == STATUS:
        rest.insert(0, rest.pop())
    groups: list[list[int]] = [[]]
    for index in rest:
        if groups[-1] and width_of(_columns(grid, [*keys, *groups[-1], index], grid.lines)) > width:
            groups.append([])
        groups[-1].append(index)
    tables: list[Grid] = []
    for group in groups:
        lines = [
            line
            for line in grid.lines
            if any(line[index] for index in group) or (not tables and not any(line[grid.num_keys :]))
        ]
        table = _columns(grid, [*keys, *group], lines)
        tables.append(replace(table, same=f"{grid.same} (continued)".strip()) if tables else table)
    return tables
