"""A training run as text for a terminal: what ``trainfit train`` prints and ``print(run)`` shows."""

from typing import TYPE_CHECKING

from rich.console import Console

from trainfit.report.console import console, heading, rows
from trainfit.report.words import describe, quantity
from trainfit.spec.recipe import Recipe
from trainfit.spec.units import format_seconds

if TYPE_CHECKING:
    from trainfit.training.observer import TrainSummary

PEAK_IS = {"cuda-allocated": "allocated on the GPU", "live-tensors": "of live tensors"}
"""What a run's peak memory counts, in words."""


def show(recipe: Recipe, summary: "TrainSummary", *, out: Console | None = None) -> None:
    """Print a training run: how it ended, losses, speed, memory, its newest checkpoint.

    Args:
        out: where to print; None: standard output.
    """
    out = out or console()
    heading(out, describe(recipe))
    good = summary.status in {"done", "stopped"}
    message = f": {summary.message}" if summary.message else ""
    out.print(f"{summary.status.upper()}{message}", style="bold green" if good else "bold red")
    lines = [
        [
            "steps",
            f"{summary.steps:,}",
            f"of {summary.run.steps:,}, {summary.steps - summary.first_step:,} of them now",
        ]
    ]
    if summary.losses:
        lines.append(["loss", f"{summary.losses[-1]:.4f}", f"from {summary.losses[0]:.4f}"])
    if summary.eval_perplexity is not None:
        lines.append(["perplexity", f"{summary.eval_perplexity:.4g}", "of documents kept from training"])
    if summary.step_s is not None:
        lines.append(
            [
                "time a step",
                format_seconds(summary.step_s),
                f"median; {format_seconds(summary.wall_s)} in all",
            ]
        )
    for name, words in (("tokens_per_s", "tokens a second"), ("mfu", "MFU"), ("hfu", "HFU")):
        if getattr(summary, name) is not None:
            lines.append([words, quantity(name, getattr(summary, name)), ""])
    if summary.peak_memory_bytes is not None:
        lines.append(
            [
                "peak memory",
                quantity("_bytes", summary.peak_memory_bytes),
                PEAK_IS.get(summary.peak_memory_is or "", ""),
            ]
        )
    rows(out, lines, "left", "right", "wrap")
    if summary.checkpoint:
        out.print(f"  checkpoint  {summary.checkpoint}", soft_wrap=True)
