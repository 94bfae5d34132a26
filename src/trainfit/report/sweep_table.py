"""A sweep's rows as a table: for the terminal (rich), as Markdown, and as cells for the page. Enters: Rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainfit.report.table import NOTHING, markdown_cell, percent
from trainfit.spec.result import Outcome
from trainfit.spec.sweep import RUNNING, WAITING, Frontier, Row, frontier
from trainfit.spec.units import GIB, MIB, format_count

if TYPE_CHECKING:
    from rich.table import Table

STYLES = {"done": "green", WAITING: "dim", RUNNING: "cyan", "refused": "yellow", "out-of-memory": "yellow"}
"""Of a status; the others are red."""
GAP = 2
"""Spaces between columns of the terminal's table."""
VERDICTS = {"fits": "green", "tight": "yellow", "does not fit": "red"}
LONGEST_MESSAGE = 160
"""In a line of progress; at the end the whole line is told."""
SHORT = {"out-of-memory": "OOM"}


@dataclass(frozen=True)
class Column:
    """A column: its title, a cell, and whether it holds numbers.

    ``rank``: where the terminal is too narrow, columns of the highest rank are left out first; of 0 never.
    """

    title: str
    cell: Callable[[Row], str]
    rank: int = 0
    is_number: bool = True

    def width(self, rows: Sequence[Row]) -> int:
        """Characters that it takes in the terminal's table."""
        return max(len(text) for text in (*self.lines, *(self.cell(row) for row in rows)))

    @property
    def lines(self) -> list[str]:
        """The title on two lines: a unit, or "predicted", stands under the quantity."""
        return self.title.split(" ", 1)


def unit(rows: Sequence[Row]) -> tuple[str, int]:
    """The unit of memory that suits the rows: GiB, or MiB where the largest measured (else predicted) is below one GiB."""
    measured = [size for row in rows if (size := row.measured_bytes) is not None]
    sizes = measured or [size for row in rows if (size := row.predicted_bytes) is not None]
    return ("GiB", GIB) if not sizes or max(sizes) >= GIB else ("MiB", MIB)


def columns(rows: Sequence[Row]) -> list[Column]:
    """The columns in which some row has a value; the name and the status are always there."""
    name, size = unit(rows)

    def memory(read: Callable[[Row], int | None]) -> Callable[[Row], str]:
        return lambda row: NOTHING if (found := read(row)) is None else f"{found / size:,.3f}"

    def room(read: Callable[[Row], int | None]) -> Callable[[Row], str]:
        return lambda row: NOTHING if (found := read(row)) is None else f"{found / size:,.2f}"

    only_predicted = not any(row.samples_per_s for row in rows)
    every = [
        Column("verdict", lambda row: row.verdict or NOTHING, is_number=False),
        Column(f"device {name}", room(lambda row: row.predicted_device_bytes), rank=3),
        Column(f"headroom {name}", room(lambda row: row.headroom_bytes), rank=2),
        Column(f"predicted {name}", memory(lambda row: row.predicted_bytes), rank=4),
        Column(f"measured {name}", memory(lambda row: row.measured_bytes)),
        Column("error", lambda row: percent(row.error), rank=1),
        Column("samples/s predicted", lambda row: _number(row.predicted_samples_per_s), rank=8),
        Column(
            "tokens/s predicted",
            lambda row: _count(row.predicted_tokens_per_s),
            rank=1 if only_predicted else 7,
        ),
        Column("samples/s", lambda row: _number(row.samples_per_s)),
        Column("samples/s overall", lambda row: _number(overall_samples_per_s(row)), rank=5),
        Column("tokens/s", lambda row: _count(row.tokens_per_s), rank=6),
        Column("MFU", lambda row: _share(row.mfu), rank=1),
        Column("HFU", lambda row: _share(row.hfu), rank=9),
        Column("perplexity", lambda row: _number(row.perplexity), rank=1),
    ]
    filled = [column for column in every if any(column.cell(row) != NOTHING for row in rows)]
    first = Column("variant", lambda row: row.variant, is_number=False)
    return [first, *filled, Column("status", lambda row: row.status, is_number=False)]


def fitting(rows: Sequence[Row], width: int) -> list[Column]:
    """The columns that fit in so many characters: while they do not, those of the highest rank go."""
    shown = columns(rows)
    while sum(column.width(rows) + GAP for column in shown) > width and any(column.rank for column in shown):
        last = max(column.rank for column in shown)
        shown = [column for column in shown if column.rank != last]
    return shown


def overall_samples_per_s(row: Row) -> float | None:
    """Of the whole training run, its first steps included."""
    return row.train["speed"]["samples_per_s"] if row.perplexity is not None and row.train else None


def text_table(rows: Sequence[Row], width: int, *, seconds: dict[str, float] | None = None) -> Table:
    """A rich table that fits ``width`` columns. ``seconds``: for how long each running variant has been running."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    shown, best = fitting(rows, width), marked(rows)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    for column in shown:
        align = "right" if column.is_number else "left"
        table.add_column(
            "\n".join(column.lines),
            justify=align,
            no_wrap=column.is_number,
            overflow="fold",
            vertical="bottom",
        )
    for row in rows:
        cells = [Text(column.cell(row)) for column in shown]
        mark = row.variant in best.variants
        cells[0] = Text(f"{'*' if mark else ' '} {row.variant}", style="bold" if mark else "")
        cells[-1] = Text(_status(row, seconds or {}), style=STYLES.get(row.status, "red"))
        cells = [
            Text(cell.plain, style=VERDICTS[cell.plain]) if cell.plain in VERDICTS else cell for cell in cells
        ]
        table.add_row(*cells)
    if best.variants:
        table.caption = f"* {best.meaning}"
        table.caption_justify = "left"
    return table


def marked(rows: Sequence[Row]) -> Frontier:
    """The frontier, if it chooses between variants: one of a single variant marks nothing."""
    best = frontier(rows)
    chooses = len(rows) > 1 if best.is_predicted else len(best.variants) > 1
    return best if chooses else best._replace(variants=())


def _status(row: Row, seconds: dict[str, float]) -> str:
    if row.status == RUNNING:
        return f"{row.message} {seconds.get(row.variant, 0.0):.0f} s"
    return f"to {row.message}" if row.status == WAITING else SHORT.get(row.status, row.status)


def line(row: Row, part: str, outcome: Outcome) -> str:
    """What came of one part, in one plain line."""
    if outcome.status != "done":
        return f"{part} {row.variant}: {outcome.status}: {_cut(first_line(outcome.message))}".rstrip(": ")
    name, size = unit([row])
    words = {
        "predict": [_value(row.predicted_bytes, f"peak {{:.3f}} {name}", size)],
        "measure": [
            _value(row.measured_bytes, f"peak {{:.3f}} {name}", size),
            f"error {percent(row.error)}" if row.error is not None else "",
            f"{_number(row.samples_per_s)} samples/s" if row.samples_per_s else "",
        ],
        "train": [
            f"perplexity {_number(row.perplexity)}" if row.perplexity else "",
            f"{_number(overall_samples_per_s(row))} samples/s" if overall_samples_per_s(row) else "",
        ],
    }[part]
    return f"{part} {row.variant}: {', '.join(word for word in words if word)}  ({outcome.seconds:.1f} s)"


def first_line(message: str) -> str:
    """The line that says most: the first, and the last where an exception is told there."""
    lines = [part.strip() for part in message.splitlines() if part.strip()]
    if not lines:
        return ""
    return lines[0] if len(lines) == 1 else f"{lines[0].rpartition(': ')[0] or lines[0]}: {lines[-1]}"


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_MESSAGE else text[: LONGEST_MESSAGE - 1] + "…"


def markdown_table(rows: Sequence[Row]) -> str:
    """Every filled column as a Markdown table; the variants that are ``marked`` are bold."""
    shown, best = columns(rows), marked(rows)
    lines = ["| " + " | ".join(column.title for column in shown) + " |"]
    lines.append("|" + "|".join("---:" if column.is_number else "---" for column in shown) + "|")
    for row in rows:
        name, *cells = [markdown_cell(column.cell(row)) for column in shown]
        lines.append(
            "| " + " | ".join([f"**{name}**" if row.variant in best.variants else name, *cells]) + " |"
        )
    return "\n".join(lines) + "\n"


def _value(value: float | None, pattern: str, size: int) -> str:
    return "" if value is None else pattern.format(value / size)


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.4g}"


def _count(value: float | None) -> str:
    return NOTHING if value is None else format_count(value) if value >= 1e6 else f"{value:,.0f}"


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1%}"
