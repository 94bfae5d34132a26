"""Tables of evidence/pages/collectives.md, from ``evidence/records/bench.jsonl``."""

from collections.abc import Mapping, Sequence

from evidence.scripts.tables import bench
from evidence.scripts.tables.bench import having, milliseconds, of_number
from trainfit.bench.experiments.collectives import BUS, NAMES, PROCESSES, SIZES_MB
from trainfit.report.bench_plot import number
from trainfit.report.table import markdown_grid
from trainfit.spec.bench import BenchRow, Cell

KEY = "backend"
PUBLISHED_S: Mapping[str, Mapping[int, float]] = {
    "nccl": {2: 0.42, 4: 0.68, 6: 0.85},
    "gloo": {2: 1.47, 4: 2.13, 6: 2.67},
}
"""Seconds of an all-reduce of 1 GB by ranks: a published run on another machine."""
FIRST = "all-reduce"


def bus_gb_per_s(ranks: int, seconds: float) -> float:
    """Return the bus bandwidth of an all-reduce of 1 GB."""
    return BUS[FIRST](ranks) / seconds


def _rows() -> Sequence[BenchRow]:
    found = bench.newest("collectives", KEY)
    return () if found is None else found.rows


def machine() -> str:
    """Return the devices and the versions."""
    return bench.machine(bench.newest("collectives", KEY))


def all_reduce() -> str:
    """Return milliseconds and bus bandwidth by backend, ranks and size, and the published run at 1 GB."""
    return _table([FIRST], is_compared=True) or _published_alone()


def others() -> str:
    """Return the same of the other collectives."""
    return _table([name for name in BUS if name != FIRST], is_compared=False) or bench.NOT_MEASURED


def _table(names: Sequence[str], *, is_compared: bool) -> str:
    lines = []
    for name in names:
        for backend in PUBLISHED_S:
            for ranks in PROCESSES["full"]:
                at: dict[str, Cell] = {"collective": name, "backend": backend, "processes": ranks}
                rows = [row for row in having(_rows(), at) if row.status != "not-run"]
                if rows:
                    cells = [_cell(having(rows, {"size_mb": size})) for size in SIZES_MB["full"]]
                    first = [] if is_compared else [name]
                    last = [_published(backend, ranks)] if is_compared else []
                    lines.append((*first, NAMES[backend], str(ranks), *cells, *last))
    heads = ["backend", "ranks", *(f"{size:,} MB" for size in SIZES_MB["full"])]
    heads = [*heads, "published, 1,000 MB"] if is_compared else ["collective", *heads]
    return markdown_grid(heads, lines, 2 if is_compared else 3) if lines else ""


def _cell(rows: Sequence[BenchRow]) -> str:
    if not rows:
        return "not run"
    (row,) = rows
    if row.status == "refused":
        return "too few GPUs"
    bus = of_number("bus_gb_per_s", ".3g")(row)
    return f"{milliseconds(row)} ({bus})" if number(row, "median_s") is not None else row.status


def _published(backend: str, ranks: int) -> str:
    seconds = PUBLISHED_S[backend][ranks]
    return f"{1e3 * seconds:,.0f} ({bus_gb_per_s(ranks, seconds):.2g})"


def _published_alone() -> str:
    lines = [
        (NAMES[backend], str(ranks), "not measured yet", _published(backend, ranks))
        for backend, times in PUBLISHED_S.items()
        for ranks in times
    ]
    return markdown_grid(("backend", "ranks", "1 to 1,000 MB", "published, 1,000 MB"), lines, 2)


def predicted() -> str:
    """Return the predicted milliseconds of NCCL's all-reduces, and their error."""
    rows = [row for row in having(_rows(), {"collective": FIRST}) if "predicted_s" in row.numbers]
    if not rows:
        return bench.NOT_MEASURED
    lines = [
        (
            str(row.point["processes"]), f"{row.point['size_mb']:,}", milliseconds(row),
            of_number("predicted_s", ",.3f", 1e3)(row), str(row.numbers["error"]),
        )
        for row in rows
    ]  # fmt: skip
    return markdown_grid(("ranks", "MB", "measured, ms", "predicted, ms", "error"), lines)


def plot() -> str:
    """Plot of time and bus bandwidth of all-reduces."""
    return bench.plotted("collectives", KEY)
