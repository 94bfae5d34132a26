"""The plot of a benchmark, from the plots that its experiment declares."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle, product

from trainfit.bench.harness.experiment import MEDIAN, Number, Plot
from trainfit.report.bench_table import cell_text
from trainfit.report.plot import CATEGORY_COLORS, COLORS, INK, Form, Panel, Series, plot_file
from trainfit.spec.bench import BenchResult, BenchRow, Cell, Curve
from trainfit.spec.units import GIB

CURVE, TIMELINE = "curve", "timeline"
MOST_COLUMNS = 4
MOST_TICKS = 10  # Labels of a logarithmic axis
ROW_HEIGHT = 1.2  # Of a timeline; 1 is busy throughout
PART_COLORS = (
    "#9ecae1", "#d9b54a", "#2f6fb2", "#c0567a", "#4a9d7c", "#a6d8c2", "#e07b39", "#7f8c3a", "#1f3f66",
    "#c9ced4", "#8b6bb1", "#cdbbe3", "#9a6b4f", "#66727f",
)  # fmt: skip
"""Colors of stacked numbers, in their order."""


def plot_of(result: BenchResult, plots: Sequence[Plot], form: Form = "svg") -> bytes | None:
    """Return the content of the plot's file; None: no row has a number to draw."""
    panels = [panel for plot in plots for panel in panels_of(result.rows, plot)]
    if not panels:
        return None
    are_alike = len(plots) == 1
    title = plots[0].title if are_alike and len(panels) > 1 else ""
    columns = min(len(panels), MOST_COLUMNS)
    name = f"bench-{result.experiment}"
    return plot_file(panels, name, form, title=title, columns=columns, share_y=are_alike)


def panels_of(rows: Sequence[BenchRow], plot: Plot) -> list[Panel]:
    """Return a panel for each combination of values of ``plot.panels`` that has data."""
    keys = {*plot.panels, *plot.x, *([plot.series] if plot.series else [])}
    mine = [row for row in rows if keys <= set(row.point)]
    mine = [row for row in mine if all(row.point.get(key) in known for key, known in plot.where.items())]
    mine = in_order(mine, plot.order)
    panels: list[Panel | None] = []
    draw_panel = {CURVE: _curves, TIMELINE: _timeline}.get(plot.y if isinstance(plot.y, str) else "", _panel)
    for values in product(*(dict.fromkeys(row.point[key] for row in mine) for key in plot.panels)):
        some = [row for row in mine if tuple(row.point[key] for key in plot.panels) == values]
        panels.append(draw_panel(some, plot, ", ".join(_name(plot, value) for value in values)))
    return [panel for panel in panels if panel is not None]


def in_order(rows: Sequence[BenchRow], order: Mapping[str, Sequence[Cell]]) -> list[BenchRow]:
    """Return rows sorted by the keys of ``order``; values that it does not list follow, numbers by size."""

    def rank(cell: Cell, known: Sequence[Cell]) -> tuple[int, float]:
        if cell in known:
            return 0, list(known).index(cell)
        return 1, float(cell) if isinstance(cell, int | float) else 0.0

    return sorted(rows, key=lambda row: [rank(row.point.get(key, ""), known) for key, known in order.items()])


def number(row: BenchRow, wanted: Number) -> float | None:
    """Return a number of a row that has a result; None where it has none."""
    if row.status not in ("done", "unsteady"):
        return None
    if not isinstance(wanted, str):
        return wanted(row)
    if wanted == MEDIAN:
        return None if row.times is None else row.times.median
    found = row.numbers.get(wanted)
    return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else None


def _panel(rows: Sequence[BenchRow], plot: Plot, title: str) -> Panel | None:
    series = list(_series(rows, plot))
    if not any(y is not None for one in series for y in one.y):
        return None
    drawn = {x for one in series for x, y in zip(one.x, one.y, strict=True) if y is not None}
    ticks = {} if plot.is_bar or not plot.x_log else _ticks(drawn)
    return Panel(
        series, title or plot.title, plot.x_label, plot.y_label, is_horizontal=plot.is_horizontal,
        x_log=plot.x_log, y_log=plot.y_log, x_ticks=ticks,
        y_limits=(None, None) if plot.y_log else (0, None),
    )  # fmt: skip


def _series(rows: Sequence[BenchRow], plot: Plot) -> Iterator[Series]:
    if isinstance(plot.y, tuple):
        for name, color in zip(plot.y, cycle(PART_COLORS), strict=False):
            label = name.removesuffix("_share").replace("_", " ")
            yield _one(rows, plot, name, Series(label, (), kind="bar", stack="all", color=color))
        return
    groups: dict[str, list[BenchRow]] = {}
    for row in rows:
        groups.setdefault(_name(plot, row.point[plot.series]) if plot.series else "", []).append(row)
    for label, mine in groups.items():
        like = Series(label, (), kind="bar", stack=label) if plot.is_bar else Series(label, ())
        yield _one(mine, plot, plot.y, like)
        if plot.bound:
            bounds = Series(plot.bound_label, (), kind="scatter", marker="|", color=INK)
            yield _one(mine, plot, plot.bound, bounds)


def _one(rows: Sequence[BenchRow], plot: Plot, name: Number, like: Series) -> Series:
    """Return ``like`` with the values of one number; where a bar has none, its text is the row's status."""
    found = [(row, number(row, name)) for row in rows]
    scaled = [None if value is None else value * plot.scale for _, value in found]
    text: list[str] = []
    if plot.text and like.kind == "bar":
        text = [
            row.status if value is None else format(value, plot.text)
            for row, value in zip(rows, scaled, strict=True)
        ]
    return replace(like, y=scaled, x=[_x(row, plot) for row in rows], text=text)


def _x(row: BenchRow, plot: Plot) -> float | str:
    cells = [row.point[key] for key in plot.x]
    if len(cells) == 1 and not plot.is_bar and isinstance(cells[0], int | float):
        return float(cells[0])
    return ", ".join(_name(plot, cell) for cell in cells)


def _name(plot: Plot, cell: Cell) -> str:
    # True equals 1 in a mapping, so the type is compared too.
    named = {(type(key), key): name for key, name in plot.names.items()}
    return named.get((type(cell), cell), f"{cell:,}" if type(cell) is int else cell_text(cell))


def _ticks(xs: Iterable[float | str]) -> dict[float, str]:
    """Return ticks at powers of two, as ``4K`` from 1,024 on; none where fewer than two are such.

    Of more than ``MOST_TICKS`` every second, third, ... has a label.
    """
    shown = sorted(float(x) for x in xs if math.log2(float(x)).is_integer())
    if len(shown) < 2:
        return {}
    every = -(-len(shown) // MOST_TICKS)
    return {x: _binary(x) if index % every == 0 else "" for index, x in enumerate(shown)}


def _binary(x: float) -> str:
    return f"{x / 1024**2:g}M" if x >= 1024**2 else f"{x / 1024:g}K" if x >= 1024 else f"{x:g}"


def _timeline(rows: Sequence[BenchRow], plot: Plot, title: str) -> Panel | None:
    """Return the one row's computation, and communication above it, over milliseconds."""
    curve = rows[0].curve if rows else None
    if curve is None:
        return None
    part_ms = float(rows[0].numbers["profiled_s"]) * 1e3 / len(curve.phases)
    at = [index * part_ms for index in range(len(curve.phases))]
    busy = {name: [one / 1000 for one in column] for name, column in curve.columns.items()}
    series = [
        Series("compute", busy["compute"], at, kind="area", color=COLORS[0]),
        Series("", [ROW_HEIGHT - one for one in busy["compute"]], at, kind="area", color="none"),
        Series("communication", busy["communication"], at, kind="area", color=COLORS[1]),
    ]
    events = {one * part_ms: phase for one, phase in _begins(curve)}
    return Panel(series, title, "ms", "busy", events=events, y_limits=(0, 2 * ROW_HEIGHT))


def _curves(rows: Sequence[BenchRow], plot: Plot, title: str) -> Panel | None:
    """Return the curve of the one row, in GiB, with a line where each phase begins."""
    curve = rows[0].curve if rows else None
    if curve is None:
        return None
    series = [
        Series(name, [size / GIB for size in curve.columns[name]], kind="area", color=color)
        for name, color in CATEGORY_COLORS.items()
        if name in curve.columns
    ]
    return Panel(series, title, y_label="GiB", events=dict(_begins(curve)), x_ticks={0.0: ""})


def _begins(curve: Curve) -> list[tuple[float, str]]:
    """Return where each phase begins, but the first, and its name."""
    begins = [(curve.phases.index(phase), phase) for phase in dict.fromkeys(curve.phases)]
    return [(float(at), phase) for at, phase in begins if at]
