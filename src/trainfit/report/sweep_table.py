"""A sweep's rows as a table: for the terminal (rich), as Markdown, and as cells for the page. Enters: Rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainfit.report.table import NOTHING, markdown_cell, percent
from trainfit.spec.result import Outcome
from trainfit.spec.sweep import RUNNING, WAITING, Row, front
from trainfit.spec.units import GIB, MIB, format_count

if TYPE_CHECKING:
    from rich.table import Table

STYLES = {"done": "green", WAITING: "dim", RUNNING: "cyan", "refused": "yellow", "out-of-memory": "yellow"}
"""Of a status; the others are red."""
WIDE_FROM = 100
"""Terminal columns from which every column is shown."""
LONGEST_MESSAGE = 160
"""In a line of progress; at the end the whole line is told."""
SHORT = {"out-of-memory": "OOM"}


@dataclass(frozen=True)
class Column:
    """A column: its title, a cell, whether the narrow table has it, and whether it holds numbers."""

    title: str
    cell: Callable[[Row], str]
    narrow: bool = True
    is_number: bool = True


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

    every = [
        Column(f"predicted {name}", memory(lambda row: row.predicted_bytes)),
        Column(f"measured {name}", memory(lambda row: row.measured_bytes)),
        Column("error", lambda row: percent(row.error)),
        Column("samples/s predicted", lambda row: _number(row.predicted_samples_per_s), narrow=False),
        Column("samples/s", lambda row: _number(row.samples_per_s)),
        Column("samples/s overall", lambda row: _number(overall_samples_per_s(row)), narrow=False),
        Column("tokens/s", lambda row: _count(row.tokens_per_s), narrow=False),
        Column("MFU", lambda row: _share(row.mfu)),
        Column("HFU", lambda row: _share(row.hfu), narrow=False),
        Column("perplexity", lambda row: _number(row.perplexity)),
    ]
    filled = [column for column in every if any(column.cell(row) != NOTHING for row in rows)]
    first = Column("variant", lambda row: row.variant, is_number=False)
    return [first, *filled, Column("status", lambda row: row.status, is_number=False)]


def overall_samples_per_s(row: Row) -> float | None:
    """Of the whole training run, its first steps included."""
    return row.train["speed"]["samples_per_s"] if row.perplexity is not None and row.train else None


def text_table(rows: Sequence[Row], width: int, *, seconds: dict[str, float] | None = None) -> Table:
    """A rich table that fits ``width`` columns. ``seconds``: for how long each running variant has been running."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    shown = [column for column in columns(rows) if column.narrow or width >= WIDE_FROM]
    best = set(front(rows)) if len(front(rows)) > 1 else set()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    for column in shown:
        # A unit, or "predicted", stands under the quantity, so that columns are no wider than their numbers.
        title = column.title.replace(" ", "\n", 1)
        align = "right" if column.is_number else "left"
        table.add_column(title, justify=align, no_wrap=column.is_number, overflow="fold", vertical="bottom")
    for row in rows:
        cells = [Text(column.cell(row)) for column in shown]
        mark = row.variant in best
        cells[0] = Text(f"{'*' if mark else ' '} {row.variant}", style="bold" if mark else "")
        cells[-1] = Text(_status(row, seconds or {}), style=STYLES.get(row.status, "red"))
        table.add_row(*cells)
    if best:
        table.caption = "* the front: nothing here is both smaller and faster"
        table.caption_justify = "left"
    return table


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
    """Every filled column as a Markdown table."""
    shown = columns(rows)
    lines = ["| " + " | ".join(column.title for column in shown) + " |"]
    lines.append("|" + "|".join("---:" if column.is_number else "---" for column in shown) + "|")
    lines += ["| " + " | ".join(markdown_cell(column.cell(row)) for column in shown) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _value(value: float | None, pattern: str, size: int) -> str:
    return "" if value is None else pattern.format(value / size)


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.4g}"


def _count(value: float | None) -> str:
    return NOTHING if value is None else format_count(value) if value >= 1e6 else f"{value:,.0f}"


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1%}"
