"""Tables and the figure of evidence/pages/soft-prompts.md."""

from evidence.scripts.tables import bench
from trainfit.bench.experiments.soft_prompts import SIZES
from trainfit.bench.harness.discovery import experiment
from trainfit.report.bench_plot import plot_of
from trainfit.report.table import markdown_grid
from trainfit.spec.bench import BenchRow
from trainfit.spec.units import MIB

NOT_YET = "Not measured yet on a GPU."


def _rows(part: str) -> list[BenchRow]:
    found = bench.results().get("soft_prompts")
    return [row for row in found.rows if row.point["part"] == part and row.numbers] if found else []


def sizes() -> str:
    """Return the parameters while training and after, and the peak with its prediction."""
    lines = []
    for row in _rows("size"):
        numbers = row.numbers
        cells = [f"{numbers[name]:,}" for name in ("trained_params", "kept_params")]
        cells += [f"{float(numbers[name]) / MIB:.1f}" for name in ("peak_bytes", "predicted_bytes")]
        lines.append((str(row.point["adapter"]), *cells))
    heads = ("adapter", "trained", "kept", "peak, MiB", "predicted, MiB")
    return markdown_grid(heads, lines, 1) if lines else NOT_YET


def losses() -> str:
    """Return the loss at the end of each training, by learning rate."""
    rows, rates = _rows("training"), SIZES["full"].rates
    last = max((int(row.point["step"]) for row in rows), default=0)
    found = {
        (str(row.point["adapter"]), float(row.point["rate"])): float(row.numbers["loss"])
        for row in rows
        if row.point["step"] == last
    }
    names = dict.fromkeys(name for name, _ in found)
    lines = [
        (name, *(f"{found[name, rate]:.3f}" if (name, rate) in found else "" for rate in rates))
        for name in names
    ]
    return markdown_grid(("adapter", *(f"rate {rate:g}" for rate in rates)), lines, 1) if lines else NOT_YET


def plot() -> str:
    """Plot the loss curves."""
    drawn = plot_of(bench.results()["soft_prompts"], experiment("soft_prompts").plots)
    assert drawn is not None
    return drawn.decode()
