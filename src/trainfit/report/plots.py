"""Plots of predictions against measurements, each an SVG as text.

Enters: Comparisons. Leaves: SVG that stands inside a page by itself, or None where there is nothing to draw. Names from
recipes are drawn as they are (no mathematics), as outlines of letters, so that they are never read as markup.
"""

import io
import re
from collections.abc import Sequence
from typing import Any

from trainfit.report.compare import GOAL, Comparison
from trainfit.spec.optional import optional
from trainfit.spec.result import CATEGORIES
from trainfit.spec.units import GIB

EXTRA = "plots"
"""The extra that installs matplotlib."""
INK, MUTED, GRID = "#1f2933", "#66727f", "#e4e7eb"
PREDICTED, MEASURED, WRONG = "#2f6fb2", "#e07b39", "#c0392b"
CATEGORY_COLOURS: dict[str, str] = dict(
    zip(
        CATEGORIES, ("#2f6fb2", "#8fbce6", "#e07b39", "#4a9d7c", "#b9c2cc", "#8b6bb1", "#d9b54a"), strict=True
    )
)
MODEL_COLOURS = (
    "#2f6fb2",
    "#e07b39",
    "#4a9d7c",
    "#8b6bb1",
    "#d9b54a",
    "#c0567a",
    "#5b9aa0",
    "#7f8c3a",
    "#9a6b4f",
    "#66727f",
)
MARKERS = "os^Dv"
MAX_ROWS = 60
"""Bars beyond this many recipes are not drawn; the page says so."""

STYLE: dict[str, Any] = {
    "font.family": "sans-serif", "font.size": 10, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": GRID,
    "xtick.color": MUTED, "ytick.color": INK, "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.8,
    "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
    "svg.fonttype": "path", "text.parse_math": False, "figure.facecolor": "none", "axes.facecolor": "none",
}  # fmt: skip


def peaks_gib(one: Comparison) -> tuple[float, float] | None:
    """Measured and predicted peak allocated, GiB, of a trial that came to its end."""
    if one.predicted is None or one.measured is None or one.status != "done":
        return None
    measured = one.measured.peak_allocated_bytes
    return (measured / GIB, one.predicted.peak_allocated_bytes / GIB) if measured else None


def scatter(comparisons: Sequence[Comparison]) -> str | None:
    """Predicted against measured peak, both axes logarithmic, with the band of the goal."""
    known = [(one, pair) for one in comparisons if (pair := peaks_gib(one)) is not None]
    if not known:
        return None
    points, pairs = [one for one, _ in known], [pair for _, pair in known]
    low, high = min(min(pair) for pair in pairs) / 1.4, max(max(pair) for pair in pairs) * 1.4
    models = list(dict.fromkeys(one.model for one in points))

    def draw(plt: Any) -> Any:
        figure, axes = plt.subplots(figsize=(7.2, 5.2))
        axes.fill_between(
            [low, high], [low * (1 - GOAL), high * (1 - GOAL)], [low * (1 + GOAL), high * (1 + GOAL)],
            color=PREDICTED, alpha=0.15, linewidth=0, label=f"within {GOAL:.0%}",
        )  # fmt: skip
        axes.plot([low, high], [low, high], color=MUTED, linewidth=0.8)
        for index, model in enumerate(models):
            mine = [pair for one, pair in zip(points, pairs, strict=True) if one.model == model]
            axes.scatter(
                *zip(*mine, strict=True), s=34, label=_short(model, 28), linewidth=0.6, edgecolor="white", zorder=3,
                color=MODEL_COLOURS[index % len(MODEL_COLOURS)], marker=MARKERS[index // len(MODEL_COLOURS) % len(MARKERS)],
            )  # fmt: skip
        axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
        axes.set(xlabel="measured peak, GiB", ylabel="predicted peak, GiB")
        plain_logarithms(axes)
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8.5)
        return figure

    return svg(draw, "scatter")


def error_bars(comparisons: Sequence[Comparison]) -> str | None:
    """The error of each recipe's predicted peak, with the band of the goal; sorted, the worst on top."""
    errors = [
        (one, error * 100) for one in comparisons if (error := one.error("peak_allocated_bytes")) is not None
    ]
    errors = sorted(errors, key=lambda item: -abs(item[1]))[:MAX_ROWS]
    if not errors:
        return None

    def draw(plt: Any) -> Any:
        figure, axes = plt.subplots(figsize=(9.2, 0.9 + 0.27 * len(errors)))
        axes.axvspan(-GOAL * 100, GOAL * 100, color=PREDICTED, alpha=0.12, linewidth=0)
        axes.axvline(0, color=MUTED, linewidth=0.8)
        colours = [PREDICTED if abs(error) <= GOAL * 100 else WRONG for _, error in errors]
        axes.barh(range(len(errors)), [error for _, error in errors], height=0.62, color=colours)
        for row, (_, error) in enumerate(errors):
            axes.annotate(
                f"{error:+.2f}", (error, row), xytext=(4 if error >= 0 else -4, 0), textcoords="offset points",
                ha="left" if error >= 0 else "right", va="center", fontsize=8, color=MUTED,
            )  # fmt: skip
        reach = max(GOAL * 100, *(abs(error) for _, error in errors)) * 1.18
        axes.set(xlim=(-reach, reach), xlabel="error of the predicted peak, %")
        _rows(axes, [_label(one) for one, _ in errors])
        return figure

    return svg(draw, "errors")


def breakdown_bars(comparisons: Sequence[Comparison]) -> str | None:
    """What holds memory at the peak: for each recipe the prediction above the measurement."""
    shown = [one for one in comparisons if one.breakdown("predicted") or one.breakdown("measured")][:MAX_ROWS]
    if not shown:
        return None

    def draw(plt: Any) -> Any:
        figure, axes = plt.subplots(figsize=(9.2, 1.1 + 0.42 * len(shown)))
        for row, one in enumerate(shown):
            for offset, side in ((-0.19, "predicted"), (0.19, "measured")):
                _stack(axes, row + offset, one.breakdown(side), one, side)
        for name in CATEGORIES:
            if any(
                (one.breakdown(side) or {}).get(name) for one in shown for side in ("predicted", "measured")
            ):
                axes.barh(0, 0, color=CATEGORY_COLOURS[name], label=name)
        axes.set(xlabel="GiB at the peak (above: predicted, below: measured; hatched: measured as a whole)")
        _rows(axes, [_label(one) for one in shown])
        axes.legend(
            loc="lower left",
            bbox_to_anchor=(0, 1.0),
            ncols=len(CATEGORIES),
            fontsize=8.5,
            columnspacing=1.2,
            handlelength=1.2,
        )
        return figure

    return svg(draw, "breakdown")


def _stack(axes: Any, y: float, held: dict[str, int] | None, one: Comparison, side: str) -> None:
    if held is None:  # Only the whole is known.
        result = one.predicted if side == "predicted" else one.measured
        whole = result.peak_allocated_bytes if result is not None else None
        axes.barh(
            y, (whole or 0) / GIB, height=0.34, color="none", edgecolor=MUTED, hatch="////", linewidth=0.6
        )
        return
    left = 0.0
    for name, size in held.items():
        axes.barh(y, size / GIB, left=left, height=0.34, color=CATEGORY_COLOURS[name])
        left += size / GIB


def time_bars(comparisons: Sequence[Comparison]) -> str | None:
    """Step time: predicted, and measured with its spread (10th to 90th percentile)."""
    shown = [one for one in comparisons if one.measured and one.measured.step_s][:MAX_ROWS]
    if not shown:
        return None

    def draw(plt: Any) -> Any:
        figure, axes = plt.subplots(figsize=(9.2, 1.0 + 0.27 * len(shown)))
        for row, one in enumerate(shown):
            times = one.measured.step_times if one.measured else None
            if times is not None:
                axes.plot(
                    [times.low, times.high],
                    [row, row],
                    color=MEASURED,
                    linewidth=5,
                    alpha=0.35,
                    solid_capstyle="round",
                )
            if one.predicted and one.predicted.step_s and one.on_its_device:
                axes.plot(one.predicted.step_s, row, "D", color=PREDICTED, markersize=5)
            axes.plot(one.measured.step_s if one.measured else None, row, "o", color=MEASURED, markersize=6)
        axes.plot([], [], "o", color=MEASURED, label="measured (band: 10 to 90 %)")
        if any(one.predicted and one.predicted.step_s and one.on_its_device for one in shown):
            axes.plot([], [], "D", color=PREDICTED, markersize=5, label="predicted")
        axes.set(xscale="log", xlabel="seconds a step")
        axes.margins(x=0.08)
        plain_logarithms(axes)
        _rows(axes, [_label(one) for one in shown])
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, fontsize=8.5)
        return figure

    return svg(draw, "times")


def _rows(axes: Any, labels: list[str]) -> None:
    axes.set_yticks(range(len(labels)), labels, fontsize=8.5)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)


def plain_logarithms(axes: Any) -> None:
    """Plain numbers on logarithmic axes, also between the powers of ten where few of those are in sight."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() != "log":
            continue
        low, high = axis.get_view_interval()
        axis.set_major_locator(LogLocator(subs=(1.0,) if high / max(low, 1e-12) > 1e3 else (1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())


def _label(one: Comparison) -> str:
    return f"{_short(one.model, 22)} · {_short(one.technique, 34)} · {one.batch}"


def _short(text: str, limit: int) -> str:
    text = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def svg(draw: Any, name: str) -> str:
    """Draw with ``draw(pyplot)`` and return the SVG element; ``name`` keeps ids apart within one page."""
    matplotlib: Any = optional("matplotlib", EXTRA)
    matplotlib.use("Agg")
    plt: Any = optional("matplotlib.pyplot", EXTRA)

    settings: dict[Any, Any] = {**STYLE, "svg.hashsalt": name}
    with matplotlib.rc_context(settings):
        figure = draw(plt)
        out = io.StringIO()
        figure.savefig(out, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
        plt.close(figure)
    text = out.getvalue()
    text = text[text.index("<svg") :]
    # One page holds several: ids that matplotlib counts within a figure (figure_1, axes_1) must not meet.
    text = re.sub(r'(id="|href="#|url\(#)', rf"\1{name}-", text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{name}" ', 1)
