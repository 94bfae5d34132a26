"""Tables of evidence/pages/bench.md on several processes, from ``evidence/records/bench.jsonl``."""

from collections.abc import Sequence

from evidence.scripts.tables.bench import having, milliseconds, of_number, results, rows
from trainfit.bench.experiments.ddp import STRATEGIES
from trainfit.bench.harness.discovery import experiment
from trainfit.report.bench_plot import TIMELINE, in_order, plot_of
from trainfit.report.table import markdown_grid
from trainfit.spec.bench import BenchRow
from trainfit.spec.units import GIB

SHOWN = {"model": "xl", "precision": "bf16"}
"""The case whose timelines are drawn."""
MEMORY = ("before", "after", "state")


def _of_results(some: Sequence[BenchRow]) -> list[BenchRow]:
    """Return the rows without those that this machine has too few GPUs for, or that were not run."""
    return [row for row in some if row.status not in ("refused", "not-run")]


def collectives() -> str:
    """Milliseconds and bus bandwidth of NCCL's collectives between two GPUs, by kind and size."""
    lines: dict[str, list[str]] = {}
    some = [row for row in rows("collectives") if "backend" not in row.point]
    for row in _of_results(some):
        assert row.point["processes"] == 2
        cell = f"{milliseconds(row)} ({of_number('bus_gb_per_s', '.0f')(row)})"
        lines.setdefault(str(row.point["collective"]), []).append(cell)
    heads = [f"{size:,} MB" for size in dict.fromkeys(row.point["size_mb"] for row in some)]
    return markdown_grid(("collective", *heads), [(name, *cells) for name, cells in lines.items()])


def ddp() -> str:
    """A data-parallel step by strategy."""
    some = [row for row in _of_results(having(rows("ddp"), SHOWN)) if "strategy" in row.point]
    lines = []
    for row in in_order(some, {"strategy": STRATEGIES}):
        lines.append(
            (
                str(row.point["strategy"]), milliseconds(row),
                of_number("exposed_share", ".1f", 100.0)(row),
                of_number("communication_s", ".1f", 1e3)(row), of_number("hidden_share", ".0f", 100.0)(row),
                of_number("peak_bytes", ".2f", 1 / GIB)(row),
            )
        )  # fmt: skip
    heads = ("strategy", "step, ms", "exposed, %", "NCCL, ms", "hidden, %", "peak, GiB")
    return markdown_grid(heads, lines)


def sharding() -> str:
    """Memory and time of a step by what is sharded, in bf16 and fp32."""
    lines: dict[str, list[list[str]]] = {}
    for row in _of_results(rows("sharding")):
        cells = [of_number(f"{name}_bytes", ".2f", 1 / GIB)(row) for name in MEMORY]
        cells.append(milliseconds(row))
        lines.setdefault(str(row.point["sharding"]), []).append(cells)
    shown = [(name, *(", ".join(cells) for cells in zip(*both, strict=True))) for name, both in lines.items()]
    heads = ("sharding", "before update, GiB", "update, GiB", "state, GiB", "step, ms")
    return markdown_grid(heads, shown)


def overlap_plot() -> str:
    """Plot of computation and communication during a step, by strategy."""
    found = results()["ddp"]
    shown = found.model_copy(update={"rows": tuple(having(found.rows, SHOWN))})
    drawn = plot_of(shown, [plot for plot in experiment("ddp").plots if plot.y == TIMELINE])
    assert drawn is not None
    return drawn.decode()
