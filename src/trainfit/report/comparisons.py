"""Predictions against measurements as a table and as plots.

Sizes are in binary units (GiB is 2**30 bytes). An error is predicted minus measured, over measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from trainfit.report import loop_text
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
from trainfit.report.table import NOTHING, Column, Table, or_dash, percent
from trainfit.spec.units import format_bytes, format_seconds, size_unit

if TYPE_CHECKING:
    import rich.table
    from rich.text import Text

MAX_ROWS = 60  # Bars of more recipes are not drawn; the page says so
SHORT_OUTCOMES = {"out-of-memory": "OOM", "timeout": "time out", "crashed": "crashed"}
PEAK = "peak_allocated_bytes"


def _value(side: str, name: str, form: Callable[[float], str] | str) -> Callable[[Comparison], str]:
    return lambda one: or_dash(one.value(side, name), form)


def _sizes(title: str, name: str) -> list[Column]:
    return [
        Column(f"{title} predicted", _value("predicted", name, format_bytes)),
        Column(f"{title} measured", _value("measured", name, format_bytes)),
        Column(f"{title} error", lambda one: percent(one.error(name)), kind=lambda one: _kind(one, name)),
    ]


def _kind(one: Comparison, name: str = PEAK) -> str:
    error = one.error(name)
    return "" if error is None or name != PEAK else "good" if abs(error) <= GOAL else "bad"


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
    *_sizes("allocated", PEAK),
    *_sizes("reserved", "peak_reserved_bytes"),
    *_sizes("device", "peak_device_bytes"),
    Column("peak met", lambda one: one.peak_met or NOTHING, False),
    Column("step predicted", _value("predicted", "step_s", format_seconds)),
    Column("step measured", _value("measured", "step_s", format_seconds)),
    Column("tokens/s", _value("measured", "tokens_per_s", "{:,.0f}")),
    Column("MFU", lambda one: or_dash(one.utilisation("mfu"), "{:.1%}")),
    Column("HFU", lambda one: or_dash(one.utilisation("hfu"), "{:.1%}")),
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
        return SHORT_OUTCOMES.get(one.status) or percent(one.error(PEAK))

    def kind(one: Comparison) -> str:
        return "warning" if one.status in SHORT_OUTCOMES else _kind(one)

    titles = {
        "model": "recipe", "allocated predicted": "predicted", "allocated measured": "measured",
        "allocated error": "error", "step measured": "step", "tokens/s": "tokens/s", "MFU": "MFU",
    }  # fmt: skip
    columns = [replace(one, title=titles[one.title]) for one in COLUMNS if one.title in titles]
    columns = [replace(one, cell=error, kind=kind) if one.title == "error" else one for one in columns]
    return Table(columns, comparisons).rich(summarise(comparisons).text(), name=_name)


def _name(one: Comparison) -> Text:
    from rich.text import Text

    text = Text(f"{one.model}  {one.batch.replace(' ', '')}", style="bold")
    text.append(f"\n{one.technique}", style="not bold dim")
    met = f"measured: the {one.peak_met} one of two peaks" if one.peak_met else ""
    for note in (one.lacking, one.other_versions, met):
        if note:
            text.append(f"\n{note}", style="not bold yellow")
    return text


def markdown_table(comparisons: Sequence[Comparison]) -> str:
    """Return every filled column as a Markdown table, with the summary below it."""
    return f"{table(comparisons).markdown()}\n\nSizes are peaks. {summarise(comparisons).text()}\n"


def loop_tables(comparisons: Sequence[Comparison]) -> list[str]:
    """Return the phases of each policy's loop that has both sides, as Markdown tables."""
    found = list[str]()
    for one in comparisons:
        predicted, measured = one.loops
        if predicted is None or measured is None:
            continue
        for title, (titles, *lines) in loop_text.comparison(predicted, measured):
            columns = [Column(name, _cell(number), number > 0) for number, name in enumerate(titles)]
            heading = f"{one.model}, {one.batch}, recipe {one.recipe.id[:8]}. {title}:"
            found.append(f"{heading}\n\n{Table(columns, lines).markdown()}\n")
    return found


def _cell(number: int) -> Callable[[Sequence[str]], str]:
    return lambda line: line[number]


def _drawn(panel: Panel, name: str, title: str) -> str:
    return draw([panel], name, title=title, is_themed=True)


def scatter(comparisons: Sequence[Comparison]) -> str | None:
    """Draw predicted against measured peaks, both axes logarithmic, with the band of the goal."""
    peaks = [
        (one.model, [one.value(side, PEAK) for side in ("measured", "predicted")])
        for one in comparisons
        if one.error(PEAK) is not None
    ]
    if not peaks:
        return None
    unit, size = size_unit(value for _, pair in peaks for value in pair)
    known = [(model, [value / size for value in pair]) for model, pair in peaks]
    ends = (min(min(pair) for _, pair in known) / 1.4, max(max(pair) for _, pair in known) * 1.4)
    band = Series(
        f"within {GOAL:.0%}", (), ends, "band", color=PREDICTED,
        low=[end * (1 - GOAL) for end in ends], high=[end * (1 + GOAL) for end in ends],
    )  # fmt: skip
    series = [band, Series("", ends, ends, color=MUTED, marker=" ")]
    for model in dict.fromkeys(model for model, _ in known):
        x, y = zip(*(pair for name, pair in known if name == model), strict=True)
        series.append(Series(model, y, x, "scatter"))
    panel = Panel(
        series, x_label=f"measured peak, {unit}", y_label=f"predicted peak, {unit}", x_log=True, y_log=True,
        x_limits=ends, y_limits=ends,
    )  # fmt: skip
    return _drawn(panel, "scatter", "Predicted against measured peak")


def error_bars(comparisons: Sequence[Comparison]) -> str | None:
    """Draw the error of each recipe's predicted peak, the largest first, with the band of the goal."""
    found = [(one, one.error(PEAK)) for one in comparisons]
    errors = [(one, 100 * error) for one, error in found if error is not None]
    if not errors:
        return None
    errors = sorted(errors, key=lambda item: -abs(item[1]))[:MAX_ROWS]
    goal = GOAL * 100
    series: list[Series] = []
    for label, color, inside in ((f"within {GOAL:.0%}", PREDICTED, True), ("beyond", WRONG, False)):
        shown = [error if (abs(error) <= goal) == inside else None for _, error in errors]
        text = ["" if error is None else f"{error:+.2f}" for error in shown]
        series.append(Series(label, shown, kind="bar", text=text, stack="error", color=color))
    reach = max(goal, *(abs(error) for _, error in errors)) * 1.18
    panel = Panel(
        series, y_label="error of the predicted peak, %", names=[_label(one) for one, _ in errors],
        is_horizontal=True, y_limits=(-reach, reach), span=(-goal, goal), lines=[0],
    )  # fmt: skip
    return _drawn(panel, "errors", "Error of the predicted peak")


def breakdown_bars(comparisons: Sequence[Comparison]) -> str | None:
    """Draw memory at the peak by category: each recipe's prediction above its measurement."""
    names = ("predicted", "measured")
    shown = [one for one in comparisons if any(one.value(side, "breakdown") for side in names)][:MAX_ROWS]
    if not shown:
        return None
    sides = {side: [one.value(side, "breakdown") for one in shown] for side in names}
    unit, size = size_unit(held.total for rows in sides.values() for held in rows if held)
    series: list[Series] = []
    for name, color in CATEGORY_COLORS.items():
        if any(held and getattr(held, name) for rows in sides.values() for held in rows):
            for side, rows in sides.items():
                sizes = [getattr(held, name) / size if held else None for held in rows]
                series.append(Series(name, sizes, kind="bar", stack=side, color=color))
    for side, rows in sides.items():
        whole = [one.value(side, PEAK) for one in shown]
        unsplit = [peak / size if peak and not held else None for peak, held in zip(whole, rows, strict=True)]
        if any(unsplit):
            series.append(Series("not split", unsplit, kind="bar", stack=side, color=MUTED, is_hollow=True))
    axis = f"{unit} at the peak (above: predicted, below: measured)"
    panel = Panel(series, y_label=axis, names=[_label(one) for one in shown], is_horizontal=True)
    return _drawn(panel, "breakdown", "Memory at the peak")


def time_bars(comparisons: Sequence[Comparison]) -> str | None:
    """Draw the time of a step: predicted, and measured with its spread (10th to 90th percentile)."""
    shown = [one for one in comparisons if one.value("measured", "step_s")][:MAX_ROWS]
    if not shown:
        return None
    is_short = all(one.value("measured", "step_s") < 1 for one in shown)
    unit, scale = ("milliseconds", 1e3) if is_short else ("seconds", 1.0)

    def of(one: Comparison, side: str, name: str) -> float | None:
        value = one.value(side, name)
        return None if value is None else value * scale

    measured = Series(
        "measured (band: 10 to 90 %)", [of(one, "measured", "step_s") for one in shown], kind="scatter",
        low=[of(one, "measured", "step_times.low") for one in shown], color=MEASURED,
        high=[of(one, "measured", "step_times.high") for one in shown],
    )  # fmt: skip
    seconds = [of(one, "predicted", "step_s") if one.on_its_device else None for one in shown]
    predicted = Series("predicted", seconds, kind="scatter", marker="D", color=PREDICTED)
    names, series = [_label(one) for one in shown], [measured, *([predicted] if any(seconds) else [])]
    panel = Panel(series, y_label=f"{unit} a step", names=names, is_horizontal=True, y_log=True)
    return _drawn(panel, "times", "Time of a step")


def _label(one: Comparison) -> str:
    return f"{short(one.model, 22)} · {short(one.technique, 48)} · {one.batch}"
