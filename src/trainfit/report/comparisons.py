"""Predictions against measurements as a table and as plots.

Sizes are in binary units (GiB is 2**30 bytes). An error is predicted minus measured, over measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from trainfit.report.compare import GOAL, Comparison, summarise
from trainfit.report.plot import (
    CATEGORY_COLORS,
    MEASURED,
    MUTED,
    PREDICTED,
    WRONG,
    Panel,
    Series,
    draw,
    short,
)
from trainfit.report.table import (
    NOTHING,
    Column,
    Table,
    number_text,
    percent,
    seconds_text,
    share_text,
    size_text,
)
from trainfit.spec.units import GIB

if TYPE_CHECKING:
    import rich.table
    from rich.text import Text

MAX_ROWS = 60
"""Bars of more recipes are not drawn; the page says so."""
SHORT_OUTCOMES = {"out-of-memory": "OOM", "timeout": "time out", "crashed": "crashed"}


def _side(one: Comparison, side: str, name: str) -> float | None:
    return getattr(getattr(one, side), name, None)


def _sizes(title: str, name: str) -> list[Column]:
    return [
        Column(f"{title} predicted", lambda one: size_text(_side(one, "predicted", name))),
        Column(f"{title} measured", lambda one: size_text(_side(one, "measured", name))),
        Column(f"{title} error", lambda one: percent(one.error(name)), kind=lambda one: _kind(one, name)),
    ]


def _kind(one: Comparison, name: str) -> str:
    error = one.error(name)
    return "" if error is None or name != "peak_allocated_bytes" else "good" if abs(error) <= GOAL else "bad"


def worst_phase(one: Comparison) -> str:
    """Return the phase whose peak is predicted worst: ``first.optimizer -0.41 %``."""
    errors = one.phase_errors()
    name = max(errors, key=lambda phase: abs(errors[phase]), default="")
    return f"{name} {percent(errors[name])}" if name else NOTHING


def outcome(one: Comparison) -> str:
    """Return how the measurement ended and what it lacks; for out of memory, whether that was predicted."""
    if one.status == "out-of-memory" and one.predicted is not None:
        return "out of memory, as predicted" if not one.predicted.fits else "out of memory, predicted to fit"
    return f"{one.status}: {one.lacking}" if one.lacking else one.status


COLUMNS = (
    Column("model", lambda one: one.model, False),
    Column("technique", lambda one: one.technique, False),
    Column("batch", lambda one: one.batch, False),
    *_sizes("allocated", "peak_allocated_bytes"),
    *_sizes("reserved", "peak_reserved_bytes"),
    *_sizes("device", "peak_device_bytes"),
    Column("step predicted", lambda one: seconds_text(_side(one, "predicted", "step_s"))),
    Column("step measured", lambda one: seconds_text(_side(one, "measured", "step_s"))),
    Column("tokens/s", lambda one: number_text(_side(one, "measured", "tokens_per_s"), "{:,.0f}")),
    Column("MFU", lambda one: share_text(one.utilisation("mfu"))),
    Column("HFU", lambda one: share_text(one.utilisation("hfu"))),
    Column("outcome", outcome, False),
    Column("versions", lambda one: one.other_versions or NOTHING, False, kind=lambda one: "warning"),
    Column("worst phase", worst_phase, False),
    Column("measured on", lambda one: one.device if one.measured else NOTHING, False),
    Column("recipe", lambda one: one.recipe.id[:8], False),
)
"""Every column, in the order of reading. Sizes are peaks; ``device`` is of the whole process."""


def table(comparisons: Sequence[Comparison]) -> Table:
    """Return the table of every column in which some recipe has a value."""
    return Table(COLUMNS, comparisons).filled()


def text_table(comparisons: Sequence[Comparison]) -> rich.table.Table:
    """Return a table for 80 columns: several lines a recipe, then the numbers."""

    def error(one: Comparison) -> str:
        return SHORT_OUTCOMES.get(one.status) or percent(one.error("peak_allocated_bytes"))

    def kind(one: Comparison) -> str:
        return "warning" if one.status in SHORT_OUTCOMES else _kind(one, "peak_allocated_bytes")

    by_title = {column.title: column for column in COLUMNS}
    shown = [
        ("recipe", by_title["model"]),
        ("predicted", by_title["allocated predicted"]),
        ("measured", by_title["allocated measured"]),
        ("error", replace(by_title["allocated error"], cell=error, kind=kind)),
        ("step", by_title["step measured"]),
        ("tokens/s", by_title["tokens/s"]),
        ("MFU", by_title["MFU"]),
    ]
    columns = [replace(column, title=title) for title, column in shown]
    return Table(columns, comparisons).rich(summarise(comparisons).text(), name=_name)


def _name(one: Comparison) -> Text:
    from rich.text import Text

    text = Text(f"{one.model}  {one.batch.replace(' ', '')}", style="bold")
    text.append(f"\n{one.technique}", style="not bold dim")
    for note in (one.lacking, one.other_versions):
        if note:
            text.append(f"\n{note}", style="not bold yellow")
    return text


def markdown_table(comparisons: Sequence[Comparison]) -> str:
    """Return every filled column as a Markdown table, with the summary below it."""
    return f"{table(comparisons).markdown()}\n\nSizes are peaks. {summarise(comparisons).text()}\n"


def scatter(comparisons: Sequence[Comparison]) -> str | None:
    """Draw predicted against measured peaks, both axes logarithmic, with the band of the goal."""
    known = [(one, pair) for one in comparisons if (pair := one.peaks_gib()) is not None]
    if not known:
        return None
    ends = (min(min(pair) for _, pair in known) / 1.4, max(max(pair) for _, pair in known) * 1.4)
    models = dict.fromkeys(one.model for one, _ in known)
    band = Series(
        f"within {GOAL:.0%}", (), ends, "band", color=PREDICTED,
        low=[end * (1 - GOAL) for end in ends], high=[end * (1 + GOAL) for end in ends],
    )  # fmt: skip
    series = [band, Series("", ends, ends, color=MUTED, marker=" ")]
    for model in models:
        x, y = zip(*(pair for one, pair in known if one.model == model), strict=True)
        series.append(Series(model, y, x, "scatter"))
    panel = Panel(
        series, x_label="measured peak, GiB", y_label="predicted peak, GiB", x_log=True, y_log=True,
        x_limits=ends, y_limits=ends,
    )  # fmt: skip
    return draw([panel], "scatter", title="Predicted against measured peak", is_themed=True)


def error_bars(comparisons: Sequence[Comparison]) -> str | None:
    """Draw the error of each recipe's predicted peak, the largest first, with the band of the goal."""
    found = [(one, one.error("peak_allocated_bytes")) for one in comparisons]
    errors = [(one, 100 * error) for one, error in found if error is not None]
    if not errors:
        return None
    errors = sorted(errors, key=lambda item: -abs(item[1]))[:MAX_ROWS]
    goal = GOAL * 100
    groups = {f"within {GOAL:.0%}": (PREDICTED, True), "beyond": (WRONG, False)}
    series = [
        Series(
            label, [error if (abs(error) <= goal) == within else None for _, error in errors], kind="bar",
            text=[f"{error:+.2f}" if (abs(error) <= goal) == within else "" for _, error in errors],
            stack="error", color=color,
        )
        for label, (color, within) in groups.items()
    ]  # fmt: skip
    reach = max(goal, *(abs(error) for _, error in errors)) * 1.18
    panel = Panel(
        series, y_label="error of the predicted peak, %", names=[_label(one) for one, _ in errors],
        is_horizontal=True, y_limits=(-reach, reach), span=(-goal, goal), lines=[0],
    )  # fmt: skip
    return draw([panel], "errors", title="Error of the predicted peak", is_themed=True)


def breakdown_bars(comparisons: Sequence[Comparison]) -> str | None:
    """Draw memory at the peak by category: each recipe's prediction above its measurement."""
    shown = [one for one in comparisons if one.breakdown("predicted") or one.breakdown("measured")][:MAX_ROWS]
    if not shown:
        return None
    sides = {side: [one.breakdown(side) for one in shown] for side in ("predicted", "measured")}
    series: list[Series] = []
    for name, color in CATEGORY_COLORS.items():
        if any(held and held[name] for rows in sides.values() for held in rows):
            for side, rows in sides.items():
                sizes = [held[name] / GIB if held else None for held in rows]
                series.append(Series(name, sizes, kind="bar", stack=side, color=color))
    for side, rows in sides.items():
        whole = [_side(one, side, "peak_allocated_bytes") for one in shown]
        unsplit = [size / GIB if size and not held else None for size, held in zip(whole, rows, strict=True)]
        if any(unsplit):
            series.append(Series("not split", unsplit, kind="bar", stack=side, color=MUTED, is_hollow=True))
    axis = "GiB at the peak (above: predicted, below: measured)"
    panel = Panel(series, y_label=axis, names=[_label(one) for one in shown], is_horizontal=True)
    return draw([panel], "breakdown", title="Memory at the peak", is_themed=True)


def time_bars(comparisons: Sequence[Comparison]) -> str | None:
    """Draw the time of a step: predicted, and measured with its spread (10th to 90th percentile)."""
    shown = [one for one in comparisons if one.measured and one.measured.step_s][:MAX_ROWS]
    if not shown:
        return None
    times = [one.measured.step_times if one.measured else None for one in shown]
    measured = Series(
        "measured (band: 10 to 90 %)", [_side(one, "measured", "step_s") for one in shown], kind="scatter",
        low=[one and one.low for one in times], high=[one and one.high for one in times], color=MEASURED,
    )  # fmt: skip
    seconds = [_side(one, "predicted", "step_s") if one.on_its_device else None for one in shown]
    predicted = Series("predicted", seconds, kind="scatter", marker="D", color=PREDICTED)
    names, series = [_label(one) for one in shown], [measured, *([predicted] if any(seconds) else [])]
    panel = Panel(series, y_label="seconds a step", names=names, is_horizontal=True, y_log=True)
    return draw([panel], "times", title="Time of a step", is_themed=True)


def _label(one: Comparison) -> str:
    return f"{short(one.model, 22)} · {short(one.technique, 34)} · {one.batch}"
