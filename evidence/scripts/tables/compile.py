"""Tables and the figure of evidence/pages/torch-compile.md."""

import statistics
from collections.abc import Sequence

from evidence.scripts import fit_compile
from evidence.scripts.fit_compile import Compilation, Fitted
from evidence.scripts.tables import bench
from trainfit.bench.experiments.compile import SHAPES
from trainfit.catalog.constants import constants
from trainfit.report.plot import MEASURED, MUTED, PREDICTED, Panel, Series, draw
from trainfit.report.table import markdown_grid
from trainfit.spec.bench import BenchRow
from trainfit.spec.units import format_seconds

NOT_YET = "Not measured yet on a GPU."


def fitted() -> Fitted:
    """Return the constants by which predictions are made."""
    known = constants().compile
    return Fitted(known.process_s, known.start_s, known.kernel_s)


def errors() -> str:
    """Return the errors of the fit, by group of compilations."""
    lines = []
    for name, some in fit_compile.groups(fit_compile.compilations()).items():
        found = fit_compile.ratios(some, fitted())
        low, high = found[0], found[-1]
        median = f"{100 * statistics.median(abs(ratio - 1) for ratio in found):.0f}"
        lines.append((name, str(len(found)), median, f"{low:.2f} to {high:.2f}"))
    heads = ("compilations", "number", "median error, %", "measured over predicted")
    return markdown_grid(heads, lines, 1)


def alone() -> str:
    """Return the compilations in a process each: predicted and measured seconds."""
    rows = [row for row in fit_compile.compilations() if row.own_process]
    lines = [
        (row.name, f"{row.kernels:,}", f"{fitted().seconds(row):.1f}", f"{row.seconds:.1f}")
        for row in sorted(rows, key=lambda row: row.kernels)
    ]
    return markdown_grid(("recipe", "kernels", "predicted, s", "measured, s"), lines, 1)


def kernels_plot() -> str:
    """Plot of seconds by kernels, measured and fitted."""
    rows = fit_compile.compilations()
    shared, own = ([row for row in rows if row.own_process == is_own] for is_own in (False, True))
    counts = [30 * 1.15**number for number in range(32)]
    series = [
        _points("measured, many in one process", shared, MEASURED),
        _points("measured, a process each", own, PREDICTED),
        _fit("fit", counts, own_process=False),
        _fit("fit, a process each", counts, own_process=True),
    ]
    panel = Panel(
        series,
        x_label="kernels and library calls of the programs",
        y_label="seconds before the first step",
        x_log=True,
        y_log=True,
    )
    title = "Compilation with an empty cache, the hosts of one H200 and one H100"
    return draw([panel], "compile-kernels", title=title, size=(7.5, 4.6))


def _fit(label: str, counts: Sequence[float], *, own_process: bool) -> Series:
    rows = [Compilation("", own_process, 1, round(count), 0.0) for count in counts]
    seconds = [fitted().seconds(row) for row in rows]
    return Series(label, seconds, counts, color=MUTED, marker=" ", is_hollow=own_process)


def _points(label: str, rows: Sequence[Compilation], color: str) -> Series:
    return Series(label, [row.seconds for row in rows], [row.kernels for row in rows], "scatter", color=color)


def _rows(part: str) -> list[BenchRow]:
    found = bench.newest("compile", "part", part)
    return [row for row in found.rows if row.point["part"] == part] if found else []


def first_steps() -> str:
    """Return compilation with an empty and a kept cache, and the steps from which it pays."""
    lines = []
    for row in _rows("first steps"):
        numbers = row.numbers
        if row.point["compile"] == "false" or "compile_s" not in numbers or row.times is None:
            continue
        lines.append(
            (
                str(row.point["model"]), str(row.point["compile"]), str(row.point["cache"]),
                f"{numbers['compile_s']:.1f}", format_seconds(row.times.median),
                f"{numbers['pays_from_steps']:,}" if "pays_from_steps" in numbers else "never",
            )
        )  # fmt: skip
    heads = ("model", "compiled", "cache", "before the first step, s", "a later step", "pays from steps")
    return markdown_grid(heads, lines, 3) if lines else NOT_YET


def lengths() -> str:
    """Return graphs and seconds of a series of lengths, by kind of shapes."""
    lines = []
    for kind in SHAPES:
        rows = [row for row in _rows("lengths") if row.point["shapes"] == kind and row.numbers]
        if rows:
            seconds = [float(row.numbers["compile_s"]) for row in rows]
            later_ms = [f"{1e3 * float(row.numbers['later_s']):.1f}" for row in rows]
            graphs = max(int(row.numbers["graphs"]) for row in rows)
            figures = (str(graphs), f"{sum(seconds):.1f}", f"{max(seconds):.1f}", later_ms[0], later_ms[-2])
            lines.append((kind, str(len(rows)), *figures))
    heads = (
        "shapes",
        "lengths",
        "graphs",
        "compiling in all, s",
        "most, s",
        "first length, ms",
        "longest, ms",
    )
    return markdown_grid(heads, lines, 1) if lines else NOT_YET
