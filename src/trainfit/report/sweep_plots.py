"""Plots of a sweep: bars of memory, speed and perplexity, and the front of memory against speed; each an SVG as text.

Enters: Rows. Leaves: SVG, or None where there is nothing to draw. Text and lines take the page's own colours, so they
are seen on light and dark; by itself an SVG has the light ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainfit.report import plots
from trainfit.report.plots import GRID, INK, MEASURED, MUTED, PREDICTED
from trainfit.report.sweep_table import unit
from trainfit.spec.sweep import RUNNING, WAITING, Row, front, frontier

MAX_ROWS = plots.MAX_ROWS
LONGEST_NAME = 34
PUBLISHED = "#9aa5b1"
PAGE_COLOURS = {INK: "ink", MUTED: "muted", GRID: "line"}
"""Colours that the page's style replaces, by the names of its variables."""
CUT = 1.5
"""Bars are cut at so many times the longest one of a variant that was measured: a recipe that did not fit by far would
flatten all others."""
SPREAD = 6.0
"""A larger quotient of the largest and the smallest value is drawn on a logarithmic axis."""
LABEL_PLACES = ((5, 8, "left"), (-5, 8, "right"), (5, -9, "left"), (-5, -9, "right"), (8, 0, "left"))
"""Where a point's name may stand: points to the right, points up, alignment."""

Values = Sequence[float | None]


@dataclass(frozen=True)
class Side:
    """One of the bars that stand beside each other: its name, colour and a value a row."""

    name: str
    colour: str
    values: Values
    is_published: bool = False
    """Then a row without a value is one that was not published."""


def memory_bars(rows: Sequence[Row], *, published_gib: Values = ()) -> str | None:
    """Peak allocated memory, predicted above measured, and above what others published for each row, if given."""
    name, size = unit(rows)
    if published_gib and name != "GiB":
        raise ValueError(f"published_gib: the rows are told in {name}, published figures are in GiB")
    sides = [
        Side("predicted", PREDICTED, [_over(row.predicted_bytes, size) for row in rows]),
        Side("measured", MEASURED, [_over(row.measured_bytes, size) for row in rows]),
    ]
    sides += _published(published_gib)
    return _bars(rows, sides, f"peak allocated, {name}", "memory", "{:,.2f}" if name == "GiB" else "{:,.1f}")


def speed_bars(rows: Sequence[Row], *, published_samples_per_s: Values = ()) -> str | None:
    """Samples a second; tokens a second where the sequences of the variants are not equally long."""
    by = _speed_unit(rows)
    factor = {row.variant: _per_sample(row, by) for row in rows}
    sides = [
        Side("predicted", PREDICTED, [_over(row.predicted_samples_per_s, 1 / factor[row.variant]) for row in rows]),
        Side("measured", MEASURED, [_over(row.samples_per_s, 1 / factor[row.variant]) for row in rows]),
    ]  # fmt: skip
    sides += _published(published_samples_per_s)
    return _bars(rows, sides, f"{by} a second", "speed", "{:,.4g}" if by == "samples" else "{:,.0f}")


def perplexity_bars(rows: Sequence[Row], *, published: Values = ()) -> str | None:
    """Perplexity on text that training did not see."""
    sides = [Side("measured", MEASURED, [row.perplexity for row in rows]), *_published(published)]
    return _bars(rows, sides, "perplexity after training (lower is better)", "perplexity", "{:.3f}")


def _published(values: Values) -> list[Side]:
    return [Side("published", PUBLISHED, values, is_published=True)] if values else []


def front_scatter(rows: Sequence[Row], *, predicted: bool = False) -> str | None:
    """Memory against speed, both measured (or both predicted); the line joins the variants that nothing else beats in both."""
    places = [(row, place) for row in rows if (place := row.place(predicted=predicted)) is not None]
    told = "predicted" if predicted else "measured"
    return _scatter(places, front(rows, predicted=predicted), f"peak allocated, {told}", told)


def predicted_scatter(rows: Sequence[Row]) -> str | None:
    """Bytes on the device against speed, predicted, of the variants that fit, where none is measured; with their frontier."""
    best = frontier(rows)
    if not best.is_predicted:
        return None
    places = [
        (row, (row.predicted_device_bytes, row.predicted_tokens_per_s))
        for row in rows
        if row.verdict == "fits" and row.predicted_device_bytes and row.predicted_tokens_per_s
    ]
    return _scatter(places, best.variants, "peak on the device, predicted", "predicted")


def _scatter(
    places: Sequence[tuple[Row, tuple[int, float]]], on_front: Sequence[str], x_label: str, told: str
) -> str | None:
    """Points of (bytes, tokens a second), those of ``on_front`` joined; None without any."""
    if not places:
        return None
    shown = [row for row, _ in places]
    name, size = unit(shown)
    by = _speed_unit(shown)
    points = {
        row.variant: (place[0] / size, place[1] * _per_sample(row, by) / row.recipe["batch"]["seq"])
        for row, place in places
    }
    best = [points[variant] for variant in on_front]
    colour = PREDICTED if told == "predicted" else MEASURED

    def draw(plt: Any) -> Any:
        figure, axes = plt.subplots(figsize=(8.2, 5.0))
        axes.step(*zip(*best, strict=True), where="post", color=colour, linewidth=1.6, alpha=0.75)
        for x, y in points.values():
            is_best = (x, y) in best
            axes.plot(x, y, "o", color=colour if is_best else MUTED, markersize=8 if is_best else 6)
        axes.plot([], [], "o-", color=colour, label="front: nothing else is both smaller and faster")
        axes.plot([], [], "o", color=MUTED, label="beaten in both")
        axes.set(
            xlabel=f"{x_label}, {name} (less is better)",
            ylabel=f"{by} a second, {told} (more is better)",
        )
        _scales(axes, points)
        _name_points(figure, axes, points, on_front)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, fontsize=8.5)
        return figure

    return themed(plots.svg(draw, "front"), f"Memory against speed, {told}, with the front of the variants")


def themed(svg: str, label: str) -> str:
    """The SVG with the page's colours, and ``label`` for those who hear it."""
    for colour, name in PAGE_COLOURS.items():
        svg = svg.replace(colour, f"var(--{name}, {colour})")
    start = svg.index('aria-label="') + len('aria-label="')
    return svg[:start] + label + svg[svg.index('"', start) :]


def _bars(rows: Sequence[Row], sides: list[Side], axis: str, name: str, number: str) -> str | None:
    """Horizontal bars, a group a row; a row without a value says why."""
    sides = [side for side in sides if any(value is not None for value in side.values)]
    if not sides:
        return None
    rows = rows[:MAX_ROWS]
    height, most = 0.72 / len(sides), _most(sides)

    def draw(plt: Any) -> Any:
        figure, axes = plt.subplots(figsize=(9.2, 0.9 + (0.24 + 0.18 * len(sides)) * len(rows)))
        for index, side in enumerate(sides):
            offset = (index - (len(sides) - 1) / 2) * height
            _side(axes, rows, side, offset, height * 0.88, number, most)
        axes.set(xlabel=axis)
        axes.margins(x=0.1)
        axes.set_xlim(left=0)
        axes.set_yticks(range(len(rows)), [_short(row.variant) for row in rows], fontsize=9)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", visible=False)
        axes.spines["left"].set_visible(False)
        if len(sides) > 1:
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(sides), fontsize=8.5)
        return figure

    words = " and ".join(side.name for side in sides)
    return themed(plots.svg(draw, name), f"Bars: {axis}, {words}, a row a variant")


def _most(sides: list[Side]) -> float:
    """The longest bar that is drawn whole."""
    measured = [max(pair) for pair in zip(*(side.values for side in sides), strict=True) if None not in pair]
    return CUT * max(measured) if len(sides) > 1 and measured else float("inf")


def _side(
    axes: Any, rows: Sequence[Row], side: Side, offset: float, height: float, number: str, most: float
) -> None:
    for place, (row, value) in enumerate(zip(rows, side.values, strict=False)):
        length = min(value or 0.0, most)
        if value is not None:
            # A bar that goes on is pale.
            axes.barh(
                place + offset, length, height=height, color=side.colour, alpha=0.45 if value > most else 1.0,
                label=_label(axes, side.name),
            )  # fmt: skip
        text = number.format(value) if value is not None else _why_not(row, side)
        if value is not None and value > most:
            text += " (cut)"
        axes.annotate(
            text, (length, place + offset), xytext=(4, 0), textcoords="offset points",
            va="center", fontsize=8, color=MUTED,
        )  # fmt: skip


def _label(axes: Any, name: str) -> str | None:
    """The side's name, once."""
    return None if name in axes.get_legend_handles_labels()[1] else name


def _why_not(row: Row, side: Side) -> str:
    """What stands where a bar would: how the trial ended; nothing where a value was not asked for."""
    if side.is_published:
        return ""
    if side.name == "predicted":
        outcome = row.outcomes.get("predict")
        return "" if outcome is None or outcome.status == "done" else f"not predicted: {outcome.status}"
    return "" if row.status in ("done", WAITING, RUNNING) else row.status


def _scales(axes: Any, points: dict[str, tuple[float, float]]) -> None:
    """A logarithmic axis where the values are far apart, else one that has some air around them."""
    axes.margins(0.16)
    for index, scale in enumerate((axes.set_xscale, axes.set_yscale)):
        values = [point[index] for point in points.values()]
        if min(values) > 0 and max(values) / min(values) > SPREAD:
            scale("log")
    plots.plain_logarithms(axes)


def _name_points(
    figure: Any, axes: Any, points: dict[str, tuple[float, float]], always: Sequence[str]
) -> None:
    """A name at each point, where it covers nothing; without such a place those of ``always`` are named all the same."""
    figure.canvas.draw()
    dots = [axes.transData.transform(point) for point in points.values()]
    taken: list[Any] = []
    for variant in sorted(points, key=lambda name: name not in always):
        for right, up, align in LABEL_PLACES:
            text = axes.annotate(
                _short(variant), points[variant], xytext=(right, up), textcoords="offset points",
                ha=align, va="center", fontsize=8, color=INK,
            )  # fmt: skip
            box = text.get_window_extent()
            covers = any(box.contains(*dot) for dot in dots) or any(box.overlaps(other) for other in taken)
            if not covers or (variant in always and (right, up, align) == LABEL_PLACES[-1]):
                taken.append(box)
                break
            text.remove()


def _speed_unit(rows: Sequence[Row]) -> str:
    return "samples" if len({row.recipe["batch"]["seq"] for row in rows}) <= 1 else "tokens"


def _per_sample(row: Row, by: str) -> int:
    return 1 if by == "samples" else row.recipe["batch"]["seq"]


def _over(value: float | None, size: float) -> float | None:
    return None if value is None else value / size


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_NAME else text[: LONGEST_NAME - 1] + "…"
