"""Results as one small HTML table for Jupyter."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainfit.report.html import render
from trainfit.report.prediction_text import cost, speed, subject, verdict
from trainfit.report.words import describe, quantity
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import CATEGORIES, Estimate, Measurement
from trainfit.spec.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from trainfit.training.observer import TrainSummary

GOOD, BAD = "#1e7d57", "#c0392b"
SPEEDS = (("tokens_per_s", "tokens/s"), ("mfu", "MFU"), ("hfu", "HFU"))

Row = tuple[str, str]


def table(title: str, verdict: str, rows: Sequence[Row], *, good: bool) -> str:
    """Return an HTML table: a caption, the verdict in green or red, then one row a name and its value."""
    return render("notebook", title=title, verdict=verdict, rows=rows, color=GOOD if good else BAD)


def prediction(recipe: Recipe | None, estimate: Estimate, notes: Sequence[str] = ()) -> str:
    """Return the table of a prediction: verdict, speed, cost, memory at the peak by category, warnings."""
    peak = estimate.peak_allocated_bytes
    parts = [(name, getattr(estimate.breakdown, name)) for name in CATEGORIES]
    money = [("cost", cost(recipe, estimate))] if estimate.tokens_per_s else []
    memory = [(name, f"{format_bytes(size)} ({size / peak:.1%})") for name, size in parts if size]
    totals = [
        ("allocated", format_bytes(peak)),
        ("reserved", format_bytes(estimate.peak_reserved_bytes)),
        ("on the device", format_bytes(estimate.peak_device_bytes)),
    ]
    host = [("pinned on the host", format_bytes(estimate.host_bytes))] if estimate.host_bytes else []
    said = [*(("warning", line) for line in estimate.warnings), *(("note", line) for line in notes)]
    rows = [("speed", speed(recipe, estimate)), *money, *memory, *totals, *host, *said]
    return table(subject(recipe, estimate), verdict(recipe, estimate), rows, good=estimate.fits)


def measurement(recipe: Recipe, measured: Measurement) -> str:
    """Return the table of a measurement: status, time, speed, memory, where it was made."""
    rows = [("device", measured.environment.device)]
    if measured.step_s is not None:
        rows.append(("time a step", format_seconds(measured.step_s)))
    rows += _speeds(measured)
    if measured.breakdown is not None:
        parts = [(name, getattr(measured.breakdown, name)) for name in CATEGORIES]
        rows += [(name, format_bytes(size)) for name, size in parts if size]
    for name in ("allocated", "reserved", "device"):
        if (size := getattr(measured, f"peak_{name}_bytes")) is not None:
            rows.append((f"peak {name}", format_bytes(size)))
    return table(describe(recipe), _ending(measured), rows, good=measured.status == "done")


def training(recipe: Recipe, summary: "TrainSummary") -> str:
    """Return the table of a training run: how it ended, losses, speed, memory, its newest checkpoint."""
    rows = [("steps", f"{summary.steps:,} of {summary.run.steps:,}")]
    if summary.losses:
        rows.append(("loss", f"{summary.losses[-1]:.4f}, from {summary.losses[0]:.4f}"))
    if summary.eval_perplexity is not None:
        rows.append(("perplexity", f"{summary.eval_perplexity:.4g}"))
    if summary.step_s is not None:
        rows.append(("time a step", format_seconds(summary.step_s)))
    rows += _speeds(summary)
    if summary.peak_memory_bytes is not None:
        rows.append(("peak memory", format_bytes(summary.peak_memory_bytes)))
    if summary.checkpoint:
        rows.append(("checkpoint", summary.checkpoint))
    return table(describe(recipe), _ending(summary), rows, good=summary.status in ("done", "stopped"))


def usage(found: Mapping[str, Any]) -> str:
    """Return the table of ``trainfit.mfu``'s numbers."""
    rows = [("GPUs", f"{found['num_gpus']} x {found['gpu']}"), ("step", format_seconds(found["step_s"]))]
    rows += [(words, quantity(name, found[name])) for name, words in SPEEDS]
    if "run_s" in found:
        rows += [("run", format_seconds(found["run_s"])), ("GPU-hours", f"{found['gpu_hours']:,.0f}")]
    if "dollars" in found:
        rows.append(("cost", f"{found['dollars']:,.0f} $"))
    title = f"{found['model']}, {format_count(found['params'])} parameters"
    return table(title, f"{found['mfu']:.2%} MFU", rows, good=found["mfu"] <= 1)


def _speeds(value: Any) -> list[Row]:
    known = [(words, name, getattr(value, name)) for name, words in SPEEDS]
    return [(words, quantity(name, number)) for words, name, number in known if number is not None]


def _ending(value: Any) -> str:
    return f"{value.status.upper()}{': ' + value.message if value.message else ''}"
