"""Predicted against measured as a table: for the terminal (rich), as Markdown, and as cells for the page.

Enters: Comparisons. Leaves: text. Sizes in binary units (GiB is 2**30 bytes); an error is predicted minus measured, over measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainfit.report.compare import GOAL, Comparison, summarise
from trainfit.spec.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

NOTHING = "–"


@dataclass(frozen=True)
class Column:
    """A column: its title, how a cell reads, and whether it holds numbers."""

    title: str
    cell: Callable[[Comparison], str]
    is_number: bool = True


def size_text(size: float | None) -> str:
    """``57.32 GiB``, ``45.87 MiB``, or a dash."""
    return NOTHING if size is None else format_bytes(size)


def percent(share: float | None) -> str:
    """``+1.23 %`` with its sign, or a dash."""
    return NOTHING if share is None else f"{share * 100:+.2f} %"


def _side(comparison: Comparison, side: str, name: str) -> float | None:
    held = comparison.predicted if side == "predicted" else comparison.measured
    return None if held is None else getattr(held, name)


def _sizes(title: str, name: str) -> list[Column]:
    return [
        Column(f"{title} predicted", lambda one: size_text(_side(one, "predicted", name))),
        Column(f"{title} measured", lambda one: size_text(_side(one, "measured", name))),
        Column(f"{title} error", lambda one: percent(one.error(name))),
    ]


def _seconds(side: str) -> Callable[[Comparison], str]:
    def cell(one: Comparison) -> str:
        step_s = _side(one, side, "step_s")
        return NOTHING if step_s is None else format_seconds(step_s)

    return cell


def _tokens(one: Comparison) -> str:
    speed = _side(one, "measured", "tokens_per_s")
    return NOTHING if speed is None else f"{speed:,.0f}"


def _share(name: str) -> Callable[[Comparison], str]:
    def cell(one: Comparison) -> str:
        share = one.utilisation(name)
        return NOTHING if share is None else f"{share:.1%}"

    return cell


def worst_phase(one: Comparison) -> str:
    """The phase whose peak is predicted worst: ``first.optimizer -0.41 %``."""
    errors = one.phase_errors()
    if not errors:
        return NOTHING
    name = max(errors, key=lambda phase: abs(errors[phase]))
    return f"{name} {percent(errors[name])}"


def outcome(one: Comparison) -> str:
    """How the measurement ended and what it lacks; for out of memory, whether that was predicted."""
    if one.status == "out-of-memory" and one.predicted is not None:
        return "out of memory, as predicted" if not one.predicted.fits else "out of memory, predicted to fit"
    lacking = one.lacking
    return f"{one.status}: {lacking}" if lacking else one.status


COLUMNS = (
    Column("model", lambda one: one.model, False),
    Column("technique", lambda one: one.technique, False),
    Column("batch", lambda one: one.batch, False),
    *_sizes("allocated", "peak_allocated_bytes"),
    *_sizes("reserved", "peak_reserved_bytes"),
    *_sizes("device", "peak_device_bytes"),
    Column("step predicted", _seconds("predicted")),
    Column("step measured", _seconds("measured")),
    Column("tokens/s", _tokens),
    Column("MFU", _share("mfu")),
    Column("HFU", _share("hfu")),
    Column("outcome", outcome, False),
    Column("worst phase", worst_phase, False),
    Column("measured on", lambda one: one.device if one.measured else NOTHING, False),
    Column("recipe", lambda one: one.recipe.id[:8], False),
)
"""Every column, in the order of reading. ``allocated``, ``reserved`` and ``device`` (the whole process) are peaks."""

SHORT_OUTCOMES = {"out-of-memory": "OOM", "timeout": "time out", "crashed": "crashed"}


def text_table(comparisons: Sequence[Comparison]) -> Table:
    """A rich table for 80 columns: two lines a recipe, then the numbers; errors beyond the goal stand out."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    numbers = {column.title: column.cell for column in COLUMNS}
    table = Table(
        box=box.SIMPLE_HEAD, caption=summarise(comparisons).text(), caption_justify="left", pad_edge=False
    )
    table.add_column("recipe", overflow="fold", ratio=1)
    for title in ("predicted", "measured", "error", "step", "tokens/s", "MFU"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in comparisons:
        # Text, not markup: a model's name is not to be read as a style.
        recipe = Text(f"{one.model}  {one.batch.replace(' ', '')}", style="bold").append(
            f"\n{one.technique}", style="not bold dim"
        )
        if one.lacking:
            recipe.append(f"\n{one.lacking}", style="not bold yellow")
        error = one.error("peak_allocated_bytes")
        verdict = Text(
            percent(error), style="" if error is None else "green" if abs(error) <= GOAL else "bold red"
        )
        if one.status in SHORT_OUTCOMES:
            verdict = Text(SHORT_OUTCOMES[one.status], style="yellow")
        sizes = [numbers[f"allocated {side}"](one) for side in ("predicted", "measured")]
        table.add_row(
            recipe, *sizes, verdict, *(numbers[title](one) for title in ("step measured", "tokens/s", "MFU"))
        )
    return table


def markdown_table(comparisons: Sequence[Comparison]) -> str:
    """Every column as a Markdown table, columns without any value left out, and the summary below it."""
    columns = filled_columns(comparisons)
    lines = ["| " + " | ".join(column.title for column in columns) + " |"]
    lines.append("|" + "|".join("---:" if column.is_number else "---" for column in columns) + "|")
    for one in comparisons:
        lines.append("| " + " | ".join(markdown_cell(column.cell(one)) for column in columns) + " |")
    return "\n".join([*lines, "", f"Sizes are peaks. {summarise(comparisons).text()}", ""])


def filled_columns(comparisons: Sequence[Comparison]) -> list[Column]:
    """The columns in which some row has a value."""
    return [column for column in COLUMNS if any(column.cell(one) != NOTHING for one in comparisons)]


def markdown_cell(text: str) -> str:
    """Text that stays text in a Markdown cell."""
    for mark in "\\|*_`[]<>":
        text = text.replace(mark, f"\\{mark}")
    return " ".join(text.split())


def markdown_grid(
    heads: Sequence[str], rows: Sequence[Sequence[str]], num_text: int = 1, is_number: Sequence[bool] = ()
) -> str:
    """A Markdown table; its first ``num_text`` columns are text, the others numbers, or ``is_number`` says which are."""
    numbers = is_number or [index >= num_text for index in range(len(heads))]
    rule = ["---:" if number else "---" for number in numbers]
    return "\n".join("| " + " | ".join(row) + " |" for row in (heads, rule, *rows))
