"""Memory through a step, as stacked areas, one small plot an explained recipe. Enters: Explanations. Leaves: SVG as text."""

from collections.abc import Sequence
from typing import Any

from trainfit.report.plots import CATEGORY_COLOURS, INK, MUTED, svg
from trainfit.spec.result import CATEGORIES, CurvePoint, Explanation
from trainfit.spec.units import GIB

NUM_COLUMNS = 4
SHOWN = ("weights", "gradients", "optimizer", "activations", "temporary", "communication", "workspace")
"""From the bottom up: what stays, then what comes and goes."""
assert set(SHOWN) == set(CATEGORIES)


def curves(rows: Sequence[tuple[str, Explanation]]) -> str:
    """Small plots with one scale, four a line; where the backward begins is marked."""
    highest = max(told.peak_allocated_bytes for _, told in rows) / GIB * 1.05

    def draw(plt: Any) -> Any:
        num_lines = -(-len(rows) // NUM_COLUMNS)
        figure, grid = plt.subplots(
            num_lines, NUM_COLUMNS, figsize=(10.4, 2.3 * num_lines), sharey=True, squeeze=False
        )
        for axes in grid.flat[len(rows) :]:
            axes.set_axis_off()
        for axes, (name, told) in zip(grid.flat, rows, strict=False):
            _draw(axes, name, told, highest)
        used = [name for name in SHOWN if any(getattr(told.most, name) for _, told in rows)]
        handles = [plt.Rectangle((0, 0), 1, 1, color=CATEGORY_COLOURS[name]) for name in used]
        figure.legend(
            handles, used, loc="upper center", ncols=len(used), fontsize=9, bbox_to_anchor=(0.5, 1.0)
        )
        figure.supylabel("GiB allocated", fontsize=9)
        figure.subplots_adjust(hspace=0.45, wspace=0.08, top=0.9, left=0.06)
        return figure

    return svg(draw, "peak-curves")


def _draw(axes: Any, name: str, told: Explanation, highest: float) -> None:
    points: Sequence[CurvePoint] = told.curve
    places = range(len(points))
    axes.stackplot(
        places,
        [[getattr(point.alive, part) / GIB for point in points] for part in SHOWN],
        colors=[CATEGORY_COLOURS[part] for part in SHOWN],
        linewidth=0,
    )
    begins = next((index for index, point in enumerate(points) if point.phase == "backward"), None)
    if begins is not None:
        axes.axvline(begins, color=INK, linewidth=0.6, linestyle=":")
        axes.annotate(
            "backward", (begins, highest), xytext=(2, -8), textcoords="offset points", fontsize=7, color=MUTED
        )
    axes.set(xlim=(0, max(1, len(points) - 1)), ylim=(0, highest), xticks=[])
    axes.set_title(f"{name}: {told.peak_allocated_bytes / GIB:.2f}", fontsize=8.5, loc="left")
