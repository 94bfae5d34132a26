"""Tables of experiments whose rows say more side by side than one below the other: steps by compilation, streams, peaks of memory.

Enters: rows of one device, in order. Leaves: paragraphs of Markdown and tables. Rows of other points have tables of their own, as always.
"""

from collections.abc import Sequence

from trainfit.report.bench_rows import COMPILES, having, number, values
from trainfit.report.bench_table import Grid, cell_text, grids
from trainfit.spec.bench import BenchRow, Cell, Spread
from trainfit.spec.units import GIB, format_seconds

Parts = list[str | Grid]
WARM = 5
"""Of the numbers of warm-up steps the one that the first table has."""
STEP_PARTS = ("forward", "backward", "optimizer", "total")
UNSTEADY = (
    "*Unsteady*: ten steps did not tell the median within 10 %. The number beside it is the spread, from the 10th to the 90th percentile, "
    "over the median: so far apart are steps that should be equal."
)


def of_steps(rows: Sequence[BenchRow]) -> Parts:
    """``transformer``: eager, blocks and whole model side by side after the warm-up; then each model's parts of a step."""
    told = [row for row in rows if "warm-up" in row.point]
    parts: Parts = []
    if any(row.status == "unsteady" for row in told):
        parts.append(UNSTEADY)
    warm = having(told, {"warm-up": WARM})
    if warm:
        parts += [f"### A whole step after {WARM} warm-up steps: median, ms", _side_by_side(warm)]
    for model in values(told, "model"):
        grid = _parts_of_a_step(having(told, {"model": model}))
        parts += [f"### {model}: mean ± standard deviation of ten steps, ms", grid]
    return parts


def _side_by_side(rows: Sequence[BenchRow]) -> Grid:
    modes = [mode for mode in COMPILES if having(rows, {"compile": mode})]
    lines: list[tuple[str, ...]] = []
    for model in values(rows, "model"):
        for precision in values(having(rows, {"model": model}), "precision"):
            found = having(rows, {"model": model, "precision": precision})
            cells = (_one(having(found, {"compile": mode})) for mode in modes)
            lines.append((str(model), str(precision), *cells))
    titles = ("model", "precision", *(COMPILES[mode] for mode in modes))
    return Grid(titles, tuple(lines), (False, False, *(True for _ in modes)), "")


def _one(rows: Sequence[BenchRow]) -> str:
    return _median(rows[0]) if rows else ""


def _median(row: BenchRow) -> str:
    """Milliseconds; with the spread where it is unsteady; the status where there are none."""
    if row.times is None or row.status not in ("done", "unsteady"):
        return row.status
    return milliseconds(row.times.median) + (
        f" (unsteady, {spread(row.times):.0%})" if row.status == "unsteady" else ""
    )


def _parts_of_a_step(rows: Sequence[BenchRow]) -> Grid:
    lines = [
        (
            str(row.point["precision"]), COMPILES.get(str(row.point["compile"]), str(row.point["compile"])),
            str(row.point["warm-up"]), *(_mean(row, part) for part in STEP_PARTS), _median(row),
        )
        for row in rows
        if row.status != "not-run"
    ]  # fmt: skip
    titles = (
        "precision",
        "compiled",
        "warm-up",
        "forward",
        "backward",
        "optimizer",
        "whole step",
        "its median",
    )
    return Grid(titles, tuple(lines), (False, False, *(True,) * 6), "")


def _mean(row: BenchRow, part: str) -> str:
    mean, deviation = number(row, f"{part}_mean_s"), number(row, f"{part}_std_s")
    return "" if mean is None or deviation is None else f"{milliseconds(mean)} ± {milliseconds(deviation)}"


def milliseconds(seconds: float) -> str:
    """Three digits of milliseconds, without the unit: ``1,310``, ``42.1``, ``0.198``."""
    ms = 1e3 * seconds
    digits = next((digits for digits, least in enumerate((100, 10, 1)) if ms >= least), 3)
    return f"{ms:,.{digits}f}"


def spread(times: Spread) -> float:
    """From the 10th to the 90th percentile, over the median."""
    return (times.high - times.low) / times.median if times.median > 0 else 0.0


# -- streams ------------------------------------------------------------------------------------------------------------


def of_streams(rows: Sequence[BenchRow]) -> Parts:
    """``streams``: the clocks, then one line for each case."""
    pairs = [row for row in rows if "case" in row.point]
    parts: Parts = [grid for grid in grids([row for row in rows if "case" not in row.point])]
    lines = [_pair(having(pairs, {"case": case})) for case in values(pairs, "case")]
    if lines:
        titles = ("case", "one stream", "two streams", "gain", "at most", "what it says")
        parts.append(Grid(titles, tuple(lines), (False, True, True, True, True, False), ""))
    return parts


def _pair(rows: Sequence[BenchRow]) -> tuple[str, ...]:
    one, two = (next(iter(having(rows, {"streams": name})), None) for name in ("one", "two"))
    gains = [number(two, name) if two else None for name in ("gain", "at_most")]
    shown = ["" if gain is None else f"{gain:.2f}" for gain in gains]
    return (str(rows[0].point["case"]), _seconds(one), _seconds(two), *shown, verdict(one, two))


def _seconds(row: BenchRow | None) -> str:
    if row is None:
        return ""
    if row.times is None:
        return row.status
    return f"{format_seconds(row.times.median)} ± {spread(row.times) / 2:.0%}"


def verdict(one: BenchRow | None, two: BenchRow | None) -> str:
    """What two times say: a gain only where the samples lie apart, and what is above the bound is noise."""
    if one is None or two is None or one.times is None or two.times is None:
        return ""
    gain, at_most = number(two, "gain"), number(two, "at_most")
    if one.times.low <= two.times.high and two.times.low <= one.times.high:
        return "no difference beyond the spread"
    if two.times.median > one.times.median:
        return "slower"
    if gain is not None and at_most is not None and gain > at_most:
        return f"all there is; {gain / at_most - 1:.1%} above the bound is noise"
    return "faster"


# -- memory -------------------------------------------------------------------------------------------------------------

PHASES = ("before", "forward", "backward", "optimizer")
EXACT = "+0 bytes"
KEYS = ("model", "attention", "context", "precision", "pass")


def of_memory(rows: Sequence[BenchRow]) -> Parts:
    """``memory``: peaks measured beside predicted, then each phase's, then what rows of other kinds say."""
    told = [row for row in rows if "source" in row.point]
    points = list(dict.fromkeys(tuple(row.point[key] for key in KEYS) for row in told))
    pairs = [(point, *_sources(told, dict(zip(KEYS, point, strict=True)))) for point in points]
    parts: Parts = []
    if pairs:
        parts += [
            "### Peaks, GiB",
            _peaks(pairs),
            "### Peak of each phase, GiB (predicted where nothing was measured)",
            _phases(pairs),
        ]
    return parts + [grid for grid in grids([row for row in rows if "source" not in row.point])]


Pair = tuple[tuple[Cell, ...], BenchRow | None, BenchRow | None]


def _sources(rows: Sequence[BenchRow], point: dict[str, Cell]) -> tuple[BenchRow | None, BenchRow | None]:
    measured, predicted = (
        next(iter(having(rows, point | {"source": source})), None) for source in ("measured", "predicted")
    )
    return measured, predicted


def _peaks(pairs: Sequence[Pair]) -> Grid:
    titles = (*KEYS[1:], "measured", "predicted", "off by", "of the first step", "predicted", "fits")
    lines: list[tuple[str, ...]] = []
    for point, measured, predicted in pairs:
        said = predicted.numbers if predicted else {}
        cells = [_gib(row, name) for name in ("peak", "first_peak") for row in (measured, predicted)]
        fits = cell_text("", said["fits"]) if "fits" in said else ""
        off_by = ", ".join(str(said[name]) for name in ("error", "off_by") if name in said)
        off_by = "0 bytes" if said.get("off_by") == EXACT else off_by
        lines.append((*map(str, point[1:]), cells[0], cells[1], off_by, cells[2], cells[3], fits))
    return Grid(titles, tuple(lines), (False,) * 4 + (True,) * 6, "")


def _phases(pairs: Sequence[Pair]) -> Grid:
    lines: list[tuple[str, ...]] = []
    for point, measured, predicted in pairs:
        row = measured if measured is not None and measured.numbers else predicted
        source = str(row.point["source"]) if row is not None else ""
        lines.append((*map(str, point[1:]), source, *(_gib(row, phase, at_rest="") for phase in PHASES)))
    return Grid((*KEYS[1:], "", *PHASES), tuple(lines), (False,) * 5 + (True,) * 4, "")


def _gib(row: BenchRow | None, name: str, at_rest: str | None = None) -> str:
    """GiB, or the row's status; ``at_rest``: what to say where the row has no such number."""
    if row is None:
        return ""
    size = number(row, f"{name}_bytes")
    if size is None:
        return row.status if at_rest is None else at_rest
    return f"{size / GIB:.2f}"
