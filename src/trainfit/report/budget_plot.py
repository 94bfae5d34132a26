"""Memory against the time of a step: each solver's budgets as a line, other ways as points. Enters: Rows. Leaves: SVG as text."""

from collections.abc import Callable, Sequence
from typing import Any

from trainfit.report.budgets import budget_gib, measured_step_s, predicted_step_s
from trainfit.report.plots import INK, MEASURED, MUTED, PREDICTED, svg
from trainfit.spec.sweep import Row
from trainfit.spec.units import GIB

OURS, COMPILER, OTHERS = "ours (a budget in GiB)", "the compiler's (a share)", "without a budget"
COLOURS = {OURS: MEASURED, COMPILER: PREDICTED, OTHERS: MUTED}
MARKERS = {OURS: "o", COMPILER: "s", OTHERS: "D"}

Points = list[tuple[float, float, str]]
"""GiB, milliseconds a step, name."""


def solver(row: Row) -> str:
    """Who decides what is recomputed."""
    recompute = row.recipe["recompute"]
    if budget_gib(row) is not None:
        return OURS
    return COMPILER if isinstance(recompute, dict) and "budget" in recompute else OTHERS


def budget_plot(rows: Sequence[Row], name: str) -> str | None:
    """Hollow and dashed: predicted; filled and solid: measured. A line joins a solver's budgets in the order of the rows, so a
    budget that is larger and yet needs less turns it back. None where nothing is known."""
    predicted = _groups(rows, lambda row: row.predicted_bytes, predicted_step_s)
    measured = _groups(rows, lambda row: row.measured_bytes, measured_step_s)
    if not predicted and not measured:
        return None

    def draw(plt: Any) -> Any:
        figure, axes = plt.subplots(figsize=(8.2, 5.0))
        for groups, is_measured in ((predicted, False), (measured, True)):
            for kind, points in groups.items():
                _line(axes, kind, points, is_measured, named=is_measured or not measured)
        axes.set(xlabel="peak allocated, GiB (less is better)", ylabel="milliseconds a step (less is better)")
        axes.margins(0.14)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, fontsize=8.5)
        return figure

    return svg(draw, name)


def _groups(
    rows: Sequence[Row], size: Callable[[Row], int | None], step_s: Callable[[Row], float | None]
) -> dict[str, Points]:
    found: dict[str, Points] = {}
    for row in rows:
        num_bytes, seconds = size(row), step_s(row)
        if num_bytes is not None and seconds is not None:
            found.setdefault(solver(row), []).append((num_bytes / GIB, seconds * 1e3, _name(row)))
    return found


def _name(row: Row) -> str:
    """The budget, as far as there is one."""
    kind, recompute = solver(row), row.recipe["recompute"]
    if kind == OTHERS:
        return row.variant
    return f"{recompute['budget_gib']:g} GiB" if kind == OURS else f"{recompute['budget']:g}"


def _line(axes: Any, kind: str, points: Points, is_measured: bool, *, named: bool) -> None:
    x, y, names = zip(*points, strict=True)
    style = {"linestyle": "-" if is_measured else "--", "linewidth": 1.5 if is_measured else 0.9}
    if kind == OTHERS:
        style = {"linestyle": "none"}
    axes.plot(
        x, y, marker=MARKERS[kind], color=COLOURS[kind], markersize=6,
        markerfacecolor=COLOURS[kind] if is_measured else "white",
        label=f"{kind}, {'measured' if is_measured else 'predicted'}", **style,
    )  # fmt: skip
    if not named:
        return
    for right, up, text in zip(x, y, names, strict=True):
        axes.annotate(
            text, (right, up), xytext=(6, 5), textcoords="offset points", fontsize=7.5, color=INK
        )  # fmt: skip
