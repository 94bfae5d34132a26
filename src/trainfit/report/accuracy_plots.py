"""The accuracy page's plots.

Enters: the comparisons with both sides. Leaves: SVG files as text.
"""

from collections.abc import Sequence
from typing import Any

from trainfit.report.accuracy_summary import time_ratio
from trainfit.report.compare import Comparison
from trainfit.report.plots import INK, MEASURED, MUTED, PREDICTED, peaks_gib, plain_logarithms, svg

BAND = 0.01
"""The band drawn in the scatter plot, a share."""
SMALLEST_BIN, NUM_DECADES = 1e-6, 6
"""The histogram's lowest edge (a share), and how many powers of ten it spans."""
SCATTER, HISTOGRAM, TIMES = "accuracy-scatter.svg", "accuracy-errors.svg", "accuracy-times.svg"
"""File names."""


def plots_of(shown: Sequence[Comparison]) -> dict[str, str]:
    """File name to SVG; what has no points is left out."""
    drawn = {SCATTER: _scatter(shown), HISTOGRAM: _histogram(shown), TIMES: _time_plot(shown)}
    return {name: picture for name, picture in drawn.items() if picture is not None}


def _by_way(shown: Sequence[Comparison]) -> tuple[tuple[str, str, str, list[Comparison]], ...]:
    """Eager and compiled recipes: their label, colour and marker."""
    return (
        ("eager", PREDICTED, "o", [one for one in shown if one.recipe.compile is False]),
        ("compiled", MEASURED, "s", [one for one in shown if one.recipe.compile is not False]),
    )


def _scatter(shown: Sequence[Comparison]) -> str | None:
    def pairs(some: Sequence[Comparison]) -> list[tuple[float, float]]:
        return [pair for one in some if (pair := peaks_gib(one)) is not None]

    every = pairs(shown)
    if not every:
        return None
    low, high = min(map(min, every)) / 1.4, max(map(max, every)) * 1.4

    def draw(plt: Any) -> Any:
        figure, axes = plt.subplots(figsize=(6.4, 5.2), facecolor="white")
        edges = [(low * factor, high * factor) for factor in (1 - BAND, 1 + BAND)]
        axes.fill_between(
            [low, high], *edges, color=PREDICTED, alpha=0.25, linewidth=0, label=f"within {BAND:.0%}"
        )
        axes.plot([low, high], [low, high], color=MUTED, linewidth=0.6)
        for label, colour, marker, some in _by_way(shown):
            if points := pairs(some):
                axes.scatter(
                    *zip(*points, strict=True), s=16, color=colour, marker=marker, alpha=0.75, linewidth=0,
                    label=f"{label}, {len(points)} recipes", zorder=3,
                )  # fmt: skip
        axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
        axes.set(xlabel="measured peak allocated, GiB", ylabel="predicted, GiB")
        plain_logarithms(axes)
        axes.legend(loc="upper left", fontsize=9)
        return figure

    return svg(draw, "accuracy-scatter")


def _histogram(shown: Sequence[Comparison]) -> str | None:
    groups = [
        (
            label,
            colour,
            [abs(error) for one in some if (error := one.error("peak_allocated_bytes")) is not None],
        )
        for label, colour, _, some in _by_way(shown)
    ]
    groups = [group for group in groups if group[2]]
    if not groups:
        return None

    def draw(plt: Any) -> Any:
        figure, axes = plt.subplots(figsize=(6.4, 3.2), facecolor="white")
        # Exact ones stand in a bin of their own, left of the first edge.
        edges = [SMALLEST_BIN * 10 ** (step / 2) for step in range(-1, 2 * NUM_DECADES + 1)]
        clamped = [
            [min(max(e, SMALLEST_BIN), edges[-1] * 0.999) if e else edges[0] * 1.01 for e in errors]
            for _, _, errors in groups
        ]
        labels = [f"{label}, {len(errors)} recipes" for label, _, errors in groups]
        axes.hist(clamped, bins=edges, stacked=True, color=[colour for _, colour, _ in groups], label=labels)
        axes.set(xscale="log", xlabel="size of the error of the predicted peak allocated", ylabel="recipes")
        ticks = [edges[0] * 10**0.25, *(SMALLEST_BIN * 10**power for power in range(1, NUM_DECADES + 1))]
        axes.set_xticks(ticks, ["exact", *(f"{tick * 100:g} %" for tick in ticks[1:])])
        axes.minorticks_off()
        axes.axvline(edges[1], color=INK, linewidth=0.6)
        axes.legend(loc="upper right", fontsize=9)
        return figure

    return svg(draw, "accuracy-errors")


def _time_plot(shown: Sequence[Comparison]) -> str | None:
    if not any(time_ratio(one) for one in shown):
        return None

    def draw(plt: Any) -> Any:
        figure, axes = plt.subplots(figsize=(6.4, 3.6), facecolor="white")
        for label, colour, marker, some in _by_way(shown):
            points = [
                (one.predicted.step_s, ratio)
                for one in some
                if (ratio := time_ratio(one)) is not None and one.predicted
            ]
            if points:
                axes.scatter(
                    *zip(*points, strict=True), s=16, color=colour, marker=marker, alpha=0.75, linewidth=0,
                    label=f"{label}, {len(points)} recipes", zorder=3,
                )  # fmt: skip
        axes.axhline(1, color=MUTED, linewidth=0.8)
        axes.set(xscale="log", yscale="log", xlabel="expected step time, s", ylabel="measured over expected")
        plain_logarithms(axes)
        axes.legend(loc="upper right", fontsize=9)
        return figure

    return svg(draw, "accuracy-times")
