"""Tables and the figures of evidence/pages/soft-prompts.md."""

from functools import cache
from pathlib import Path

from evidence.scripts.tables import bench
from evidence.scripts.tables.peak_memory import sweep
from trainfit.bench.harness.discovery import experiment
from trainfit.records import load
from trainfit.report.bench_plot import plot_of
from trainfit.report.table import markdown_grid
from trainfit.spec.bench import BenchResult, BenchRow
from trainfit.spec.units import GIB, MIB

ON_CPU = Path(__file__).parents[2] / "records" / "soft-prompts-cpu.jsonl"
NOT_YET = "Not measured yet on a GPU."


@cache
def result(device: str) -> BenchResult | None:
    """Return the experiment's result on a GPU (``cuda``) or a CPU (``cpu``); None: there is none."""
    if device == "cuda":
        return bench.results().get("soft_prompts")
    (record,) = load(ON_CPU)
    return record.bench


def rows(part: str, device: str) -> list[BenchRow]:
    """Return the rows of a part that have numbers."""
    found = result(device)
    return [row for row in found.rows if row.point["part"] == part and row.numbers] if found else []


def sizes() -> str:
    """Return the parameters while training and after, and the peak with its prediction."""
    lines = []
    for row in rows("size", "cuda"):
        numbers = row.numbers
        cells = [f"{numbers[name]:,}" for name in ("trained_params", "kept_params")]
        cells += [f"{float(numbers[name]) / MIB:.1f}" for name in ("peak_bytes", "predicted_bytes")]
        lines.append((str(row.point["adapter"]), *cells))
    heads = ("adapter", "trained", "kept", "peak, MiB", "predicted, MiB")
    return markdown_grid(heads, lines, 1) if lines else NOT_YET


KEPT = {"prompt": 20 * 2048, "p-tuning, mlp": 20 * 2048, "p-tuning, lstm": 20 * 2048,
        "prefix": 20 * 16 * 2 * 512, "prefix, mlp": 20 * 16 * 2 * 512}  # fmt: skip
"""Numbers that an export of Llama 3.2 1B's 20 virtual tokens holds: t e, or 2 t L k."""


def memory() -> str:
    """Return parameters and peak of a step of Llama 3.2 1B, predicted and measured."""
    lines = []
    for variant, row in sweep("soft-prompts").items():
        assert row.estimate is not None
        lines.append(
            (
                variant, f"{row.estimate.trainable_params:,}", f"{KEPT[variant]:,}",
                f"{row.estimate.peak_allocated_bytes / GIB:.3f}",
                f"{row.measured_bytes / GIB:.3f}" if row.measured_bytes else "not yet",
            )
        )  # fmt: skip
    heads = ("adapter", "trained", "kept", "peak, GiB, predicted", "measured")
    return markdown_grid(heads, lines, 1)


def ends(device: str) -> dict[tuple[str, float], float]:
    """Return the loss at the end of each training, by adapter and learning rate."""
    found = rows("training", device)
    last = max((int(row.point["step"]) for row in found), default=0)
    return {
        (str(row.point["adapter"]), float(row.point["rate"])): float(row.numbers["loss"])
        for row in found
        if row.point["step"] == last
    }


def losses(device: str) -> str:
    """Return the loss at the end of each training, by adapter and learning rate, as a table."""
    found = ends(device)
    names, rates = dict.fromkeys(name for name, _ in found), sorted({rate for _, rate in found})
    lines = [
        (name, *(f"{found[name, rate]:.3f}" if (name, rate) in found else "not run" for rate in rates))
        for name in names
    ]
    return markdown_grid(("adapter", *(f"rate {rate:g}" for rate in rates)), lines, 1) if lines else NOT_YET


def plot(device: str) -> str:
    """Plot the loss curves."""
    found = result(device)
    assert found is not None
    drawn = plot_of(found, experiment("soft_prompts").plots)
    assert drawn is not None
    return drawn.decode()
