"""Tables of evidence/pages/bench.md and evidence/pages/kernels.md from ``evidence/records/bench.jsonl``."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

from evidence.scripts.bench_records import merged
from trainfit.bench.harness.discovery import experiment
from trainfit.bench.harness.experiment import Plot
from trainfit.bench.workloads.steps import PRECISIONS, SIZES
from trainfit.records import load
from trainfit.report.bench_plot import in_order, number, plot_of
from trainfit.report.table import markdown_grid
from trainfit.spec.bench import BenchResult, BenchRow, Cell
from trainfit.spec.units import GIB, KIB, format_bytes

FILE = Path(__file__).parents[2] / "records/bench.jsonl"
Text = Callable[[BenchRow], str]
BODIES: dict[Cell, str] = {
    "ours": "trainfit",
    "cudnn": "cuDNN",
    "flash": "flash",
    "flex": "FlexAttention",
    "plain": "trainfit, plain",
}


@cache
def results() -> dict[str, BenchResult]:
    """Return the merged results on the H200, by experiment."""
    found = sorted(merged(load(FILE)), key=lambda one: one.result.gpu == "h200")
    return {one.result.experiment: one.result for one in found}


def rows(name: str) -> tuple[BenchRow, ...]:
    """Return the merged rows of an experiment."""
    return results()[name].rows


def newest(name: str, key: str, value: str | None = None, *, needs_gpu: bool = True) -> BenchResult | None:
    """Return the newest result of an experiment, of any device, that has points with ``key``.

    With ``value``, points where the key has it and that were measured.
    """
    found = [
        one
        for one in merged(load(FILE))
        if one.result.experiment == name
        and any(
            key in row.point and (value is None or (row.point[key] == value and row.status != "not-run"))
            for row in one.result.rows
        )
        and (one.result.environment.driver is not None or not needs_gpu)
    ]
    return max(found, key=lambda one: one.records[-1].created_at).result if found else None


NOT_MEASURED = "*Not measured yet on a GPU.*"


def machine(result: BenchResult | None) -> str:
    """Return a sentence that names the device, its clocks and the versions of a result."""
    if result is None:
        return NOT_MEASURED
    where = result.environment
    clocks = [f"{name} at {mhz:,} MHz" for name, mhz in where.clocks_mhz.items() if name in ("sm", "memory")]
    named = {"driver": where.driver, "CUDA": where.cuda, "torch": where.torch, "CPU": where.cpu}
    versions = [f"{name} {version}" for name, version in named.items() if version]
    return f"Measured on {', '.join([where.device, *clocks, *versions])}."


PLACEHOLDER = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 400 40" role="img">'
    '<text x="200" y="25" text-anchor="middle" font-family="sans-serif" font-size="14" fill="#667">'
    "not measured yet on a GPU</text></svg>"
)
"""Drawn until there is a record."""


def plotted(
    name: str, key: str, which: Callable[[Plot], bool] = lambda plot: True, *, needs_gpu: bool = True
) -> str:
    """Return the SVG of an experiment's plots; before there is a record, one that says so."""
    result = newest(name, key, needs_gpu=needs_gpu)
    plots = [plot for plot in experiment(name).plots if which(plot)]
    drawn = plot_of(result, plots) if result is not None else None
    if drawn is not None:
        return drawn.decode()
    return PLACEHOLDER


def attention_plot() -> str:
    """Plot of causal attention by length."""
    return _plot("flash")


def step_parts_plot() -> str:
    """Plot of the parts of a training step."""
    return _plot("kernels")


def _plot(name: str) -> str:
    drawn = plot_of(results()[name], experiment(name).plots)
    assert drawn is not None
    return drawn.decode()


def having(some: Sequence[BenchRow], point: Mapping[str, Cell]) -> list[BenchRow]:
    """Return the rows whose points have all of ``point``."""
    return [row for row in some if point.items() <= row.point.items()]


def of_number(name: str, spec: str, scale: float = 1.0) -> Text:
    """Return a function that formats a number of a row; ``*`` marks an unsteady one."""

    def text(row: BenchRow) -> str:
        value = number(row, name)
        if value is None:
            return row.status if row.status not in ("done", "unsteady") else ""
        return format(value * scale, spec) + ("*" if row.status == "unsteady" else "")

    return text


def milliseconds(row: BenchRow) -> str:
    """Return the median in milliseconds with three digits."""
    seconds = number(row, "median_s")
    if seconds is None:
        return row.status
    ms = 1e3 * seconds
    digits = next((digits for digits, least in enumerate((100, 10, 1)) if ms >= least), 3)
    return f"{ms:,.{digits}f}" + ("*" if row.status == "unsteady" else "")


def pivot(
    some: Sequence[BenchRow], keys: Mapping[str, str], across: str, names: Mapping[Cell, str], text: Text
) -> str:
    """Return a table with a line for each value of ``keys`` and a column for each value of ``across``."""
    lines: dict[tuple[str, ...], dict[Cell, str]] = {}
    for row in some:
        at = tuple(_cell(row.point[key]) for key in keys)
        lines.setdefault(at, {})[row.point[across]] = text(row)
    found = [(*at, *(cells.get(value, "") for value in names)) for at, cells in lines.items()]
    return markdown_grid([*keys.values(), *names.values()], found, len(keys))


def _cell(cell: Cell) -> str:
    return f"{cell:,}" if type(cell) is int else str(cell)


SHOWN = (1024, 2048, 8192, 16384)
"""Lengths in the table of rates; its figure has all."""


def attention_rates() -> str:
    """TFLOP/s of causal attention, 16 heads, bf16, forward and backward."""
    some = having(rows("flash"), {"dtype": "bf16", "heads": 16, "pass": "both"})
    some = [row for row in in_order(some, {"head": (128, 64), "seq": ()}) if row.point["seq"] in SHOWN]
    keys = {"head": "head size", "seq": "tokens"}
    return pivot(some, keys, "body", BODIES, of_number("tflops_per_s", ".0f"))


LENGTHS = (1024, 16384, 65536)


def attention_memory() -> str:
    """Return milliseconds, and the bytes held before the backward, of one head of 64, by length."""
    some = [row for row in rows("attention") if row.point["heads"] == 1 and row.point["head"] == 64]
    lines = []
    for dtype in ("bf16", "fp32"):
        for seq in LENGTHS:
            at = {"dtype": dtype, "seq": seq}
            cells = [
                _first(having(some, {**at, "body": body, "pass": "both"}), milliseconds)
                for body in ("eager", "compiled", "ours")
            ]
            cells += [
                _first(having(some, {**at, "body": body, "pass": "forward"}), _before_backward)
                for body in ("eager", "ours")
            ]
            if cells[2]:
                lines.append((dtype, f"{seq:,}", *cells))
    heads = (
        "dtype", "tokens", "written out, ms", "compiled, ms", "trainfit, ms", "held, written out",
        "held, trainfit",
    )  # fmt: skip
    return markdown_grid(heads, lines, 2)


def _first(some: Sequence[BenchRow], text: Text) -> str:
    return text(some[0]) if some else ""


def _before_backward(row: BenchRow) -> str:
    size = row.numbers.get("before_backward_bytes")
    return row.status if size is None else format_bytes(float(size))


def transformer() -> str:
    """Milliseconds of a whole step after five warm-up steps: eager, compiled by block, compiled whole."""
    some = having(rows("transformer"), {"warm-up": 5})
    lines = []
    for model in SIZES:
        ways = [
            [milliseconds(row) for mode in ("false", "block", "model") for row in having(some, {
                "model": model, "precision": precision, "compile": mode})]
            for precision in PRECISIONS
        ]  # fmt: skip
        lines.append((model, *("throttled" if set(way) == {"throttled"} else ", ".join(way) for way in ways)))
    return markdown_grid(("model", *PRECISIONS), lines)


def memory() -> str:
    """Return the peaks of a whole step of the 2.7B model; predicted where it runs out of memory."""
    lines: dict[tuple[str, str], list[str]] = {}
    predicted = having(rows("memory"), {"pass": "whole step", "source": "predicted"})
    for row in in_order(predicted, {"attention": ("eager", "sdpa"), "context": (), "precision": ("fp32",)}):
        (measured,) = having(rows("memory"), {**row.point, "source": "measured"})
        fits = measured.status != "out-of-memory"
        cells = [_gib(measured if fits else row, name) for name in ("first_peak_bytes", "peak_bytes")]
        lines.setdefault((str(row.point["attention"]), f"{row.point['context']:,}"), []).extend(cells)
    heads = [f"{precision}: {step}" for precision in ("fp32", "amp-bf16") for step in ("first step", "later")]
    return markdown_grid(("attention", "context", *heads), [(*key, *line) for key, line in lines.items()], 2)


def _gib(row: BenchRow, name: str) -> str:
    size = number(row, name)
    return row.status if size is None else f"{size / GIB:.2f}"


def bandwidth() -> str:
    """GB/s of reads by level of memory."""
    lines = [
        (
            str(row.point["level"]),
            format_bytes(float(row.point["set_kib"]) * KIB),
            of_number("gb_per_s", ",.0f")(row),
        )
        for row in rows("gpu")
        if "level" in row.point
    ]
    return markdown_grid(("level", "set", "GB/s"), lines)


def products() -> str:
    """TFLOP/s of matrix products of 8,192, and the share of the data sheet."""
    some = [row for row in rows("gpu") if row.point.get("size") == 8192]
    rate, share = of_number("tflops_per_s", ",.0f"), of_number("of_data_sheet", ".0f", 100.0)
    return markdown_grid(
        ("dtype", "TFLOP/s", "% of data sheet"),
        [(str(row.point["dtype"]), rate(row), share(row)) for row in some],
    )


def fusion() -> str:
    """GB/s of RMSNorm and SwiGLU by body and number of rows."""
    names: dict[Cell, str] = {32768: "32,768 rows, GB/s", 512: "512 rows, GB/s"}
    return pivot(rows("fusion"), {"body": "body"}, "rows", names, of_number("gb_per_s", ",.0f"))


def dataloader() -> str:
    """Share of the loop's time that the device waits, by workers, two batches ahead."""
    some = [
        row
        for row in rows("dataloader")
        if row.point.get("data") == "loaded" and row.point["prefetch"] in (0, 2)
    ]
    names: dict[Cell, str] = {False: "pageable, %", True: "pinned, %"}
    return pivot(some, {"workers": "workers"}, "pinned", names, of_number("waiting_share", ".1f", 100.0))
