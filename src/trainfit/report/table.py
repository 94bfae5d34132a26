"""Tables: columns declared once, for a terminal (rich), as Markdown, or as the cells of an HTML page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import rich.table
    from rich.text import Text

NOTHING = "–"
GAP = 2  # Spaces between the columns on a terminal
STYLES = {"good": "green", "bad": "bold red", "warning": "yellow", "waiting": "dim", "running": "cyan"}
"""Kinds of cells (the CSS classes of a page) and their styles on a terminal."""


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    title: str  # The quantity, and after a space its unit or which one it is
    cell: Callable[[Any], str]  # Text of a row's cell; NOTHING where the row has no value
    is_number: bool = True
    rank: int = 0  # On a narrow terminal, the highest ranks are left out first, rank 0 never
    kind: Callable[[Any], str] = lambda row: ""  # A key of STYLES, or empty

    def width(self, rows: Sequence[Any]) -> int:
        """Return the characters that the column takes on a terminal, its title on two lines."""
        return max(len(text) for text in (*self.title.split(" ", 1), *map(self.cell, rows)))


@dataclass(frozen=True)
class Table:
    """Rows under columns; ``is_marked``: whether a row stands out."""

    columns: Sequence[Column]
    rows: Sequence[Any]
    is_marked: Callable[[Any], bool] = lambda row: False

    def filled(self) -> Table:
        """Return the table with the columns in which some row has a value."""
        held = [one for one in self.columns if any(one.cell(row) != NOTHING for row in self.rows)]
        return replace(self, columns=held)

    def fitted(self, width: int) -> Table:
        """Return the table with the columns that fit in ``width`` characters, those of the lowest ranks."""
        shown = list(self.columns)
        while sum(one.width(self.rows) + GAP for one in shown) > width and any(one.rank for one in shown):
            last = max(one.rank for one in shown)
            shown = [one for one in shown if one.rank != last]
        return replace(self, columns=shown)

    def markdown(self) -> str:
        """Return the table as Markdown; the first cell of a marked row is bold."""
        rows = [[markdown_cell(one.cell(row)) for one in self.columns] for row in self.rows]
        for cells, row in zip(rows, self.rows, strict=True):
            cells[0] = f"**{cells[0]}**" if self.is_marked(row) else cells[0]
        heads, numbers = zip(*((one.title, one.is_number) for one in self.columns), strict=True)
        return markdown_grid(heads, rows, is_number=numbers)

    def rich(self, caption: str = "", *, name: Callable[[Any], Text] | None = None) -> rich.table.Table:
        """Return the table for a terminal.

        Args:
            name: makes the first cell of a row; by default its text, starred where the row is marked.
        """
        from rich.text import Text

        def first(row: Any) -> Text:
            mark = self.is_marked(row)
            return Text(f"{'*' if mark else ' '} {self.columns[0].cell(row)}", style="bold" if mark else "")

        def cell(column: Column, row: Any) -> Text:  # Text, not markup: no style is read out of a name.
            return Text(column.cell(row), style=STYLES.get(column.kind(row), ""))

        lines = [[(name or first)(row), *(cell(one, row) for one in self.columns[1:])] for row in self.rows]
        justify = ["right" if one.is_number else "wrap" for one in self.columns]
        table = layout(lines, justify, [one.title.replace(" ", "\n", 1) for one in self.columns])
        table.caption, table.caption_justify = caption or None, "left"
        if name is not None:
            table.columns[0].ratio = 1
            for column in table.columns:
                column.vertical = "top"
        return table


def layout(
    lines: Iterable[Sequence[str | Text]], justify: Sequence[str], heads: Sequence[str] = ()
) -> rich.table.Table:
    """Lay out every table of the terminal: unframed columns, ``heads`` over a rule.

    Args:
        justify: of each column: left, right (both on one line), or wrap (left, over several lines).
    """
    from rich import box
    from rich.table import Table

    style = box.SIMPLE_HEAD if heads else None
    table = Table(box=style, show_header=bool(heads), show_edge=False, pad_edge=False, collapse_padding=True)
    table.padding = (0, 1 if heads else GAP, 0, 0)  # With a rule, the box has a space between columns.
    for head, one in zip_longest(heads, justify, fillvalue=""):
        side, edge = "right" if one == "right" else "left", "bottom" if heads else "top"
        table.add_column(head, justify=side, no_wrap=one != "wrap", overflow="fold", vertical=edge)
    for line in lines:
        table.add_row(*line)
    return table


def markdown_cell(text: str) -> str:
    """Return text that stays text in a Markdown cell."""
    for mark in "\\|*_`[]<>":
        text = text.replace(mark, f"\\{mark}")
    return " ".join(text.split())


def markdown_grid(
    heads: Sequence[str], rows: Sequence[Sequence[str]], num_text: int = 1, is_number: Sequence[bool] = ()
) -> str:
    """Return a Markdown table of cells that are Markdown.

    Args:
        num_text: how many columns are text, from the left; the others are numbers.
        is_number: which columns are numbers, in place of ``num_text``.
    """
    numbers = is_number or [index >= num_text for index in range(len(heads))]
    rule = ["---:" if number else "---" for number in numbers]
    return "\n".join("| " + " | ".join(row) + " |" for row in (heads, rule, *rows))


def or_dash(value: float | None, form: Callable[[float], str] | str = "{:.4g}") -> str:
    """Return a number by a function or a pattern; a dash for None."""
    return NOTHING if value is None else form.format(value) if isinstance(form, str) else form(value)


def percent(share: float | None) -> str:
    """Return ``+1.23 %`` with its sign, or a dash."""
    return or_dash(share if share is None else share * 100, "{:+.2f} %")
