"""The plot of a benchmark, as an SVG in text: lines over one of the point's numbers, or bars over its names."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainfit.report.bench_curves import memory_curves, part_bars
from trainfit.report.bench_table import cell_text, title
from trainfit.report.plots import MARKERS, MODEL_COLOURS, plain_logarithms, svg
from trainfit.spec.bench import BenchResult, BenchRow, Cell

MEDIAN = "median_s"
MOST_LETTERS = 80
"""Of all names beneath bars, each as long as the longest; with more the bars lie."""
MOST_INSIDE = 6
"""Entries of a legend; a longer one is beside the plot."""
Drawn = dict[str, list[tuple[Cell, float]]]
"""Points (x, y) by the name of their line."""


@dataclass(frozen=True)
class Axes:
    """What is drawn: ``y`` over ``x``, a line for each value of ``lines``, of the rows whose point has ``only``."""

    x: str
    y: str
    lines: tuple[str, ...]
    only: tuple[tuple[str, str | int], ...] = ()
    scale: str = "log"


AXES: dict[str, Axes] = {
    "attention": Axes("seq", MEDIAN, ("dtype", "body"), (("head", 64), ("pass", "both"))),
    "flash": Axes(
        "seq", "tflops_per_s", ("body",), (("dtype", "bf16"), ("heads", 16), ("head", 128), ("pass", "both"))
    ),
    "transformer": Axes("model", MEDIAN, ("precision", "compile"), (("warm-up", 5),)),
    "accumulation": Axes("method", "relative_error", ("floats",)),
    "dataloader": Axes("workers", MEDIAN, ("prefetch", "pinned"), (("data", "loaded"),), "linear"),
    "fusion": Axes("body", "gb_per_s", ("rows",), scale="linear"),
    "gpu": Axes("set_kib", "gb_per_s", ("level",)),
    "streams": Axes("case", "gain", ("streams",), scale="linear"),
}
"""By experiment."""
OWN_PLOTS: dict[str, Callable[[BenchResult], str | None]] = {"kernels": part_bars, "memory": memory_curves}
"""Experiments whose plot is of another kind; one that is in neither has no plot."""


def plot_of(result: BenchResult) -> str | None:
    """The experiment's plot; None where it has none, or where no row has what would be drawn."""
    if result.experiment in OWN_PLOTS:
        return OWN_PLOTS[result.experiment](result)
    axes = AXES.get(result.experiment)
    if axes is None:
        return None
    drawn = lines_of(result, axes)
    if not drawn:
        return None

    def draw(plt: Any) -> Any:
        figure, area = plt.subplots(figsize=(7.2, 4.4))
        y = "median, s" if axes.y == MEDIAN else title(axes.y)
        if any(isinstance(x, str) for points in drawn.values() for x, _ in points):
            _bars(area, drawn, axes.scale, title(axes.x), y)
        else:
            area.set(xscale=axes.scale, yscale=axes.scale, xlabel=title(axes.x), ylabel=y)
            _lines(area, drawn)
        plain_logarithms(area)
        beside = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)} if len(drawn) > MOST_INSIDE else {}
        if len(drawn) > 1:
            area.legend(title=", ".join(map(title, axes.lines)), fontsize=8.5, title_fontsize=8.5, **beside)
        return figure

    return svg(draw, f"bench-{result.experiment}")


def _lines(area: Any, drawn: Drawn) -> None:
    for index, (name, points) in enumerate(drawn.items()):
        colour, marker = MODEL_COLOURS[index % len(MODEL_COLOURS)], MARKERS[index % len(MARKERS)]
        area.plot(*zip(*sorted(points), strict=True), color=colour, marker=marker, markersize=5, label=name)


def _bars(area: Any, drawn: Drawn, scale: str, x: str, y: str) -> None:
    """Upright; lying, the first on top, where the names need the room."""
    names = list(dict.fromkeys(str(x) for points in drawn.values() for x, _ in points))
    lie = len(names) * max(map(len, names)) > MOST_LETTERS
    width = 0.8 / len(drawn)
    for index, (name, points) in enumerate(drawn.items()):
        at = [names.index(str(x)) + (index - (len(drawn) - 1) / 2) * width for x, _ in points]
        colour = MODEL_COLOURS[index % len(MODEL_COLOURS)]
        (area.barh if lie else area.bar)(at, [y for _, y in points], width, color=colour, label=name)
    if lie:
        area.set_yticks(range(len(names)), names)
        area.invert_yaxis()
        area.set(xscale=scale, xlabel=y, ylabel=x)
    else:
        area.set_xticks(range(len(names)), names)
        area.set(yscale=scale, xlabel=x, ylabel=y)


def lines_of(result: BenchResult, axes: Axes) -> Drawn:
    """Points (x, y) of each line; rows without the number, or with an impossible time, are in none."""
    found: Drawn = {}
    for row in result.rows:
        y = _y(row, axes.y)
        if axes.x not in row.point or y is None or not set(axes.lines) <= set(row.point):
            continue
        if any(row.point.get(key) != wanted for key, wanted in axes.only):
            continue
        name = ", ".join(cell_text("", row.point[key]) for key in axes.lines)
        found.setdefault(name, []).append((row.point[axes.x], y))
    return found


def _y(row: BenchRow, name: str) -> float | None:
    if row.status not in ("done", "unsteady"):
        return None
    if name == MEDIAN:
        return None if row.times is None else row.times.median
    number = row.numbers.get(name)
    return float(number) if isinstance(number, int | float) else None
