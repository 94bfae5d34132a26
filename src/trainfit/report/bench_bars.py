"""Bars of ``streams`` and ``gpu``, each beside its bound. Enters: a benchmark's result. Leaves: SVG as text, or None for nothing to draw."""

from typing import Any

from trainfit.report.bench_rows import having, number, rate_text, values
from trainfit.report.bench_step_tables import verdict
from trainfit.report.plots import INK, MODEL_COLOURS, MUTED, svg
from trainfit.spec.bench import BenchResult, BenchRow
from trainfit.spec.units import KIB, format_bytes

BLUE, GREY = MODEL_COLOURS[0], "#8795a3"
DIFFERENT = ("faster", "slower", "all there is")
"""How a verdict on two times begins that is more than their spread."""


def stream_bars(result: BenchResult) -> str | None:
    """The gain of each case, grey where it is within the spread, with a mark at what it can be at most."""
    pairs = [
        (
            str(row.point["case"]),
            row,
            next(iter(having(result.rows, dict(row.point) | {"streams": "one"})), None),
        )
        for row in result.rows
        if row.point.get("streams") == "two" and number(row, "gain") is not None
    ]
    if not pairs:
        return None
    gains = [number(two, "gain") or 0.0 for _, two, _ in pairs]
    sure = [verdict(one, two).startswith(DIFFERENT) for _, two, one in pairs]
    bounds = [
        (index, bound)
        for index, (_, two, _) in enumerate(pairs)
        if (bound := number(two, "at_most")) is not None
    ]

    def draw(plt: Any) -> Any:
        figure, axes = plt.subplots(figsize=(8.0, 0.9 + 0.34 * len(pairs)))
        bars = axes.barh(range(len(pairs)), gains, 0.7, color=[BLUE if one else GREY for one in sure])
        axes.bar_label(
            bars, labels=[f"{gain:.2f}" for gain in gains], label_type="center", fontsize=8.5, color="white"
        )
        axes.axvline(1, color=MUTED, linewidth=1.0)
        if bounds:
            axes.plot(
                [bound for _, bound in bounds],
                [at for at, _ in bounds],
                "|",
                color=INK,
                markersize=15,
                markeredgewidth=1.8,
            )
        _rows(axes, [name for name, _, _ in pairs])
        axes.set(xlim=(0, 1.08 * max(2.0, *gains)), xlabel="time in one stream over time in two")
        handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in (BLUE, GREY)]
        handles.append(
            plt.Line2D([], [], color=INK, marker="|", markersize=12, markeredgewidth=1.8, linestyle="")
        )
        words = ["a difference", "within the spread", "at most"]
        axes.legend(handles, words, loc="lower center", bbox_to_anchor=(0.3, 1.0), ncols=3, fontsize=9)
        axes.set_title("What a second stream gains", fontsize=11.5, pad=30, loc="center")
        return figure

    return svg(draw, f"bench-{result.experiment}")


def gpu_bars(result: BenchResult) -> str | None:
    """Bandwidth of reads by level of memory; rates of matrix products, with a mark at the data sheet's."""
    levels = [row for row in result.rows if "level" in row.point and number(row, "gb_per_s") is not None]
    rated = [
        row
        for row in result.rows
        if {"dtype", "size"} <= set(row.point) and number(row, "tflops_per_s") is not None
    ]
    products = [max(having(rated, {"dtype": dtype}), key=_rate) for dtype in values(rated, "dtype")]
    kinds = [kind for kind in (("level", levels), ("product", products)) if kind[1]]
    if not kinds:
        return None

    def draw(plt: Any) -> Any:
        figure, grid = plt.subplots(1, len(kinds), figsize=(1.0 + 4.4 * len(kinds), 3.4), squeeze=False)
        for (kind, rows), axes in zip(kinds, grid[0], strict=True):
            (_draw_levels if kind == "level" else _draw_products)(axes, rows)
        figure.tight_layout(pad=0.6, w_pad=2.0)
        return figure

    return svg(draw, f"bench-{result.experiment}")


def _rate(row: BenchRow) -> float:
    return number(row, "tflops_per_s") or 0.0


def _draw_levels(axes: Any, rows: list[BenchRow]) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    rates = [number(row, "gb_per_s") or 0.0 for row in rows]
    bars = axes.barh(range(len(rows)), rates, 0.7, color=BLUE)
    axes.bar_label(bars, labels=[f"{rate:,.0f}" for rate in rates], padding=3, fontsize=8, color=MUTED)
    _rows(axes, [f"{row.point['level']}, {format_bytes(float(row.point['set_kib']) * KIB)}" for row in rows])
    axes.margins(x=0.16)
    axes.set(xlabel="GB/s")
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_title("Reads by level of memory and size of the set", fontsize=10.5, loc="left")


def _draw_products(axes: Any, rows: list[BenchRow]) -> None:
    rates, shares = [_rate(row) for row in rows], [number(row, "of_data_sheet") for row in rows]
    axes.barh(range(len(rows)), rates, 0.7, color=BLUE, label="measured")
    sheet = [(rate / share, at) for at, (rate, share) in enumerate(zip(rates, shares, strict=True)) if share]
    for at, (rate, share) in enumerate(zip(rates, shares, strict=True)):
        label, end = rate_text(rate) + (f", {share:.0%}" if share else ""), rate / share if share else rate
        axes.annotate(
            label, (end, at), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8, color=MUTED
        )
    if sheet:
        axes.plot(
            *zip(*sheet, strict=True),
            "|",
            color=INK,
            markersize=15,
            markeredgewidth=1.8,
            label="data sheet, dense",
        )
        axes.legend(loc="lower right", fontsize=8.5)
    _rows(axes, [str(row.point["dtype"]) for row in rows])
    axes.margins(x=0.2)
    axes.set(xlabel="TFLOP/s; % of the data sheet")
    axes.set_title("Matrix products of random data", fontsize=10.5, loc="left")


def _rows(axes: Any, names: list[str]) -> None:
    """Names beside lying bars, the first on top."""
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
