"""MFU, HFU, time and cost of a run as text for a terminal: what ``trainfit mfu`` prints and ``print(trainfit.mfu(...))`` shows."""

import math
from typing import Any

from rich.console import Console

from trainfit.report.console import console, heading, notes, rows
from trainfit.spec.units import format_count, format_flops, format_seconds


def show(found: dict[str, Any], *, out: Console | None = None) -> None:
    """Print the numbers that ``trainfit.mfu`` found.

    Args:
        found: by name, as the command's JSON has them.
        out: where to print; None: standard output.
    """
    out = out or console()
    number = {key: value for key, value in found.items() if isinstance(value, int | float)}
    if "mfu" in found:
        trained = number["trainable_params"]
        some = "" if trained == number["params"] else f", {format_count(trained)} of them trained"
        out.print(f"{found['model']}, {format_count(number['params'])} parameters{some}", style="bold")
        closed = found["closed_form"]
        simple = closed if isinstance(closed, dict) else None
        rows(out, [
            ["GPUs", f"{found['num_gpus']} x {found['gpu']}", f"{number['peak_flops_per_s'] / 1e12:,.4g} TFLOP/s dense peak each"],
            ["step", format_seconds(number["step_s"]), f"{number['tokens_per_s']:,.0f} tokens a second"],
            ["model FLOPs", format_flops(number["model_flops"]), f"forward and backward, attention {found['attention']}"],
            ["hardware FLOPs", format_flops(number["hardware_flops"]), "executed, recomputation included"],
            ["MFU", f"{number['mfu']:.2%}", f"closed form: {simple['mfu']:.2%}" if simple else ""],
            ["HFU", f"{number['hfu']:.2%}", f"closed form: {simple['hfu']:.2%}" if simple else ""],
        ], "left", "right", "wrap")  # fmt: skip
        if simple:
            out.print(f"  closed form: {simple['convention']}", soft_wrap=True)
        if number["mfu"] > 1:
            out.print(
                "  more than the peak allows: check --step-s, --count and --precision", style="bold red"
            )
        without = found["ops_without_flops"]
        assert isinstance(without, list)
        notes(out, "Operations without a FLOP rule (counted as 0)", without)
    if "run_s" in found:
        heading(out, f"A run over {format_count(number['tokens'])} tokens")
        lines = [
            [
                "time",
                format_seconds(number["run_s"]),
                f"{math.ceil(number['tokens'] / number['step_tokens']):,} steps",
            ],
            ["GPU-hours", _amount(number["gpu_hours"]), ""],
        ]
        if "dollars" in found:
            price = f"{number['price_per_gpu_hour']:.2f} $ a GPU-hour"
            lines.append(["cost", f"{_amount(number['dollars'])} $", price])
        else:
            lines.append(["cost", "-", "no price known: give --price"])
        rows(out, lines, "left", "right", "wrap")
    elif "dollars" in found:
        hours = f"{_amount(number['gpu_hours'])} GPU-hours at {number['price_per_gpu_hour']:.2f} $"
        out.print(f"{hours}: {_amount(number['dollars'])} $")


def _amount(value: float) -> str:
    """Return hours or dollars for people: whole ones, and three digits of fewer than a hundred."""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
