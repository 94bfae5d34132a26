"""The plot of a benchmark, as an SVG in text: what is drawn of each experiment. How it is drawn is bench_panels.py's.

Lines over one of the point's numbers, or bars over its names, in as many panels as one key of the point has values.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from trainfit.report.bench_bars import gpu_bars, stream_bars
from trainfit.report.bench_curves import memory_curves, part_bars
from trainfit.report.bench_panels import Drawn, Look, Panel, draw_panels
from trainfit.report.bench_rows import COMPILES, PRECISIONS, SIZES, Order, in_order, number
from trainfit.report.bench_table import cell_text
from trainfit.spec.bench import BenchResult, BenchRow, Cell

MEDIAN = "median_s"
UNITS = {MEDIAN: 1e3, "waiting_share": 100.0}
"""What a number is multiplied with to be drawn: milliseconds, per cent."""
TOKENS = "tokens in a sequence (1K is 1,024)"


@dataclass(frozen=True)
class Axes:
    """What is drawn: ``y`` over ``x``, a line for each value of ``lines``, of the rows whose point has one of each key's ``only``.

    ``panels``: the key with a panel for each of its values; ``names``: words for values of lines and panels; ``order``: the rows' order.
    """

    x: str
    y: str
    lines: tuple[str, ...]
    look: Look
    only: Mapping[str, tuple[Cell, ...]] = field(default_factory=dict)
    panels: str = ""
    names: Mapping[Cell, str] = field(default_factory=dict)
    order: Order = field(default_factory=dict)


AXES: dict[str, Axes] = {
    "attention": Axes(
        "seq", MEDIAN, ("body",),
        Look("Attention of one head of 64, unmasked: forward and backward", TOKENS, "median, ms", x_log=True, y_log=True),
        {"heads": (1,), "head": (64,), "pass": ("both",)}, "dtype", {"eager": "written out"},
    ),
    "flash": Axes(
        "seq", "tflops_per_s", ("body",),
        Look("Causal attention, 16 heads, bf16: forward and backward", TOKENS, "TFLOP/s", x_log=True),
        {"dtype": ("bf16",), "heads": (16,), "pass": ("both",)}, "head",
        {128: "head size 128", 64: "head size 64", "cudnn": "cuDNN", "flash": "PyTorch's flash", "plain": "ours, plain Triton"},
    ),
    "transformer": Axes(
        "model", MEDIAN, ("precision",),
        Look("A training step after 5 warm-up steps", "model", "median, ms", y_log=True),
        {"warm-up": (5,)}, "compile", {mode: name if mode == "false" else f"compiled: {name}" for mode, name in COMPILES.items()},
        {"compile": tuple(COMPILES), "model": SIZES, "precision": PRECISIONS},
    ),
    "accumulation": Axes(
        "method", "relative_error", ("floats",),
        Look("Error of a sum of many floats, by the order of addition", "", "relative error", y_log=True, lies=True, digits="{:.1e}"),
    ),
    "dataloader": Axes(
        "workers", "waiting_share", ("pinned",),
        Look("How long the device waits for data, two batches ahead", "workers", "% of the loop's time", bars=True, digits="{:.1f}"),
        {"data": ("loaded",), "prefetch": (0, 2)}, "", {False: "pageable memory", True: "pinned memory"},
    ),
    "fusion": Axes(
        "body", "gb_per_s", ("rows",),
        Look("RMSNorm and SwiGLU: bandwidth of what any way must move", "", "GB/s", lies=True, digits="{:,.0f}", legend="rows"),
    ),
}  # fmt: skip
"""By experiment."""
OWN_PLOTS: dict[str, Callable[[BenchResult], str | None]] = {
    "kernels": part_bars, "memory": memory_curves, "gpu": gpu_bars, "streams": stream_bars,
}  # fmt: skip
"""Experiments whose plot is of another kind; one that is in neither has no plot."""


def plot_of(result: BenchResult) -> str | None:
    """The experiment's plot; None where it has none, or where no row has what would be drawn."""
    if result.experiment in OWN_PLOTS:
        return OWN_PLOTS[result.experiment](result)
    axes = AXES.get(result.experiment)
    if axes is None:
        return None
    panels = panels_of(result, axes)
    return draw_panels(panels, axes.look, f"bench-{result.experiment}") if panels else None


def panels_of(result: BenchResult, axes: Axes) -> list[Panel]:
    """A panel for each value of ``axes.panels`` that has something to draw."""
    rows = in_order(result.rows, axes.order)
    values = (
        list(dict.fromkeys(row.point[axes.panels] for row in rows if axes.panels in row.point))
        if axes.panels
        else [None]
    )
    made: list[Panel] = []
    for value in values:
        mine = result.model_copy(
            update={
                "rows": tuple(row for row in rows if value is None or row.point.get(axes.panels) == value)
            }
        )
        drawn = lines_of(mine, axes)
        if drawn:
            missing = {
                _name(row, axes): row.status
                for row in mine.rows
                if _is_of(row, axes) and _y(row, axes.y) is None
            }
            title = "" if value is None else axes.names.get(value, cell_text("", value))
            made.append(
                Panel(title, drawn, {key: status for key, status in missing.items() if key[0] in drawn})
            )
    return made


def lines_of(result: BenchResult, axes: Axes) -> Drawn:
    """Points (x, y) of each line; rows without the number, or with an impossible time, are in none."""
    found: Drawn = {}
    for row in result.rows:
        y = _y(row, axes.y)
        if y is not None and _is_of(row, axes):
            name, x = _name(row, axes)
            found.setdefault(name, []).append((x, y * UNITS.get(axes.y, 1.0)))
    return found


def _is_of(row: BenchRow, axes: Axes) -> bool:
    return {axes.x, *axes.lines} <= set(row.point) and all(
        row.point.get(key) in wanted for key, wanted in axes.only.items()
    )


def _name(row: BenchRow, axes: Axes) -> tuple[str, Cell]:
    """The line's name, and where on it the row is."""
    name = ", ".join(axes.names.get(row.point[key], _text(row.point[key])) for key in axes.lines)
    x = row.point[axes.x]
    return name, str(x) if axes.look.bars else x


def _text(cell: Cell) -> str:
    return f"{cell:,}" if isinstance(cell, int) and not isinstance(cell, bool) else cell_text("", cell)


def _y(row: BenchRow, name: str) -> float | None:
    if row.status not in ("done", "unsteady"):
        return None
    if name == MEDIAN:
        return None if row.times is None else row.times.median
    return number(row, name)
