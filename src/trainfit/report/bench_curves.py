"""Plots of experiments that no two axes tell: memory through a step, and a step's time by part of the model. Leaves: SVG as text."""

import re
from collections.abc import Sequence
from typing import Any

from trainfit.report.bench_rows import PRECISIONS, SIZES, in_order
from trainfit.report.bench_table import cell_text
from trainfit.report.peak_curves import SHOWN
from trainfit.report.plots import CATEGORY_COLOURS, INK, MUTED, svg
from trainfit.spec.bench import BenchResult, BenchRow, Cell, Curve
from trainfit.spec.units import GIB

NUM_COLUMNS = 4
SHARE = "_share"
WHOLE = "whole step"
PART_COLOURS = (
    "#9ecae1", "#d9b54a", "#2f6fb2", "#c0567a", "#4a9d7c", "#a6d8c2", "#e07b39", "#7f8c3a", "#1f3f66", "#c9ced4", "#8b6bb1", "#cdbbe3",
    "#9a6b4f", "#66727f",
)  # fmt: skip
"""Of the model's parts in the order of a row's numbers: no two are alike."""


def memory_curves(result: BenchResult) -> str | None:
    """Small plots, predicted and measured side by side: a line for each kind of run, attention and context."""
    rows = _told([row for row in result.rows if "source" in row.point])
    if not any(row.curve for row in rows):
        return None
    lines: dict[str, list[BenchRow]] = {}
    for row in sorted(rows, key=_order):
        name = f"{row.point['pass']}\n{row.point['attention']}, context {row.point['context']}"
        lines.setdefault(name, []).append(row)

    def draw(plt: Any) -> Any:
        figure, grid = plt.subplots(len(lines), NUM_COLUMNS, figsize=(10.4, 1.7 * len(lines)), squeeze=False)
        for index, (name, mine) in enumerate(lines.items()):
            _draw_line(grid[index], name, mine, is_first=index == 0)
        used = [name for name in SHOWN if any(row.curve and name in row.curve.columns for row in rows)]
        handles = [plt.Rectangle((0, 0), 1, 1, color=CATEGORY_COLOURS[name]) for name in used]
        figure.legend(
            handles, used, loc="lower center", ncols=len(used), fontsize=9, bbox_to_anchor=(0.5, 1.0)
        )
        figure.tight_layout(pad=0.4)
        title = "Memory through a step, GiB: a line for each kind of run, attention and context"
        figure.suptitle(title, y=1.0 + 0.32 / figure.get_figheight(), va="bottom", fontsize=11.5, color=INK)
        return figure

    return _short(svg(draw, f"bench-{result.experiment}"))


def _told(rows: list[BenchRow]) -> list[BenchRow]:
    """All whole steps, and of the forwards alone each attention's longest: the shorter ones look the same."""
    longest: dict[Cell, int] = {}
    for row in rows:
        context = int(row.point["context"])
        longest[row.point["attention"]] = max(context, longest.get(row.point["attention"], 0))
    return [
        row
        for row in rows
        if row.point["pass"] == WHOLE or row.point["context"] == longest[row.point["attention"]]
    ]


def _short(text: str) -> str:
    """Outlines to a tenth of a point and no indents: a third fewer bytes."""
    text = re.sub(r' d="[^"]+"', lambda found: re.sub(r"(\.\d)\d+", r"\1", found[0]), text)
    return re.sub(r"\n +", "\n", text)


def _order(row: BenchRow) -> tuple[bool, str, int]:
    """Whole steps before forwards, short contexts before long ones."""
    return row.point["pass"] != WHOLE, str(row.point["attention"]), int(row.point["context"])


def _draw_line(line: Sequence[Any], name: str, rows: Sequence[BenchRow], *, is_first: bool) -> None:
    """One line of plots, all of one scale: what can be compared stands side by side. Where there is no curve, why."""
    modes = list(dict.fromkeys(str(row.point["precision"]) for row in rows))
    highest = max((max(_totals(row)) for row in rows if row.curve), default=GIB) / GIB * 1.2
    for axes in line:
        axes.set(ylim=(0, highest), xticks=[])
        axes.tick_params(labelsize=7, labelleft=axes is line[0])
    for row in rows:
        axes = line[2 * modes.index(str(row.point["precision"])) + (row.point["source"] == "measured")]
        said = f"{row.point['precision']}, {row.point['source']}, peak: " if is_first else ""
        if row.curve is None:
            said += row.status
        else:
            said += f"{float(row.numbers['peak_bytes']) / GIB:.2f}"
            _draw_curve(axes, row.curve, highest, named=is_first)
        axes.set_title(said, fontsize=8, loc="left")
    line[0].set_ylabel(name, fontsize=8)


def _draw_curve(axes: Any, curve: Curve, highest: float, *, named: bool) -> None:
    parts = [part for part in SHOWN if part in curve.columns]
    axes.stackplot(
        range(len(curve.phases)),
        [[size / GIB for size in curve.columns[part]] for part in parts],
        colors=[CATEGORY_COLOURS[part] for part in parts],
        linewidth=0,
    )
    for phase in dict.fromkeys(curve.phases):
        begins = curve.phases.index(phase)
        if begins:
            axes.axvline(begins, color=INK, linewidth=0.6, linestyle=":")
            if named:
                where, side = ((2, -7), "left") if phase != "optimizer" else ((-2, 2), "right")
                axes.annotate(
                    phase, (begins, highest if side == "left" else 0), xytext=where, textcoords="offset points",
                    fontsize=6.5, color=MUTED if side == "left" else "white", ha=side,
                )  # fmt: skip
    axes.set(xlim=(0, max(1, len(curve.phases) - 1)))


def _totals(row: BenchRow) -> list[int]:
    assert row.curve is not None
    return [sum(values) for values in zip(*row.curve.columns.values(), strict=True)]


def part_bars(result: BenchResult) -> str | None:
    """The whole step's time by part of the model: a bar for each profiled point."""
    rows = [row for row in result.rows if "profiled" in row.point and row.numbers]
    if not rows:
        return None
    rows = in_order(rows, {"model": SIZES, "precision": PRECISIONS, "context": ()})
    names = [name for name in rows[0].numbers if name.endswith(SHARE)]
    assert len(names) <= len(PART_COLOURS), "more parts than colours"

    def draw(plt: Any) -> Any:
        figure, axes = plt.subplots(figsize=(8.6, 0.9 + 0.34 * len(rows)))
        places, left = range(len(rows)), [0.0] * len(rows)
        for index, name in enumerate(names):
            shares = [100 * float(row.numbers[name]) for row in rows]
            label = name.removesuffix(SHARE).replace("_", " ")
            axes.barh(
                places,
                shares,
                left=left,
                color=PART_COLOURS[index],
                label=label,
                edgecolor="white",
                linewidth=0.3,
            )
            left = [before + share for before, share in zip(left, shares, strict=True)]
        axes.set_yticks(
            places,
            [
                ", ".join(cell_text("", row.point[key]) for key in ("model", "precision", "context"))
                for row in rows
            ],
        )
        axes.invert_yaxis()
        axes.set(xlim=(0, 100), xlabel="% of the time that the device works")
        axes.set_title(
            "A whole step by part of the model (model, precision, context)", fontsize=11.5, loc="left"
        )
        axes.grid(axis="y", visible=False)
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8)
        return figure

    return svg(draw, f"bench-{result.experiment}")
