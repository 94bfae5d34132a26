"""A measurement as text for a terminal: what ``trainfit measure`` prints and ``print(measurement)`` shows."""

from rich.console import Console

from trainfit.report.console import console, heading, rows
from trainfit.report.words import describe, quantity
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import PHASES, Measurement
from trainfit.spec.units import format_bytes, format_count, format_seconds


def show(recipe: Recipe, result: Measurement, *, out: Console | None = None) -> None:
    """Print a measurement: status, memory by phase, times with their spread, where it was made.

    Args:
        out: where to print; None: standard output.
    """
    out = out or console()
    out.print(describe(recipe), style="bold")
    built = f"{format_count(result.params)} parameters · " if result.params else ""
    out.print(f"{built}recipe {result.recipe_id}")
    where = result.environment
    software = ", ".join(f"{name} {version}" for name, version in _software(result) if version)
    out.print(f"{where.device} ({format_bytes(where.device_bytes)}) · {software}")
    style = "bold green" if result.status == "done" else "bold red"
    out.print()
    out.print(f"{result.status.upper()}{': ' + result.message if result.message else ''}", style=style)
    if result.phases is not None:
        heading(out, "Highest allocated bytes by phase")
        rows(out, _phase_lines(result), "left", "right", "right")
    heading(out, "One step")
    rows(out, _step_lines(result), "left", "right", "wrap")


def _software(result: Measurement) -> list[tuple[str, str | None]]:
    where = result.environment
    return [
        ("torch", where.torch),
        ("CUDA", where.cuda),
        ("driver", where.driver),
        ("transformers", where.transformers),
    ]


def _phase_lines(result: Measurement) -> list[list[str]]:
    assert result.phases is not None
    phases = result.phases
    lines = [["", "first step", "steady step"], ["after init", format_bytes(phases.after_init), ""]]
    for phase in PHASES:
        lines.append(
            [phase, format_bytes(getattr(phases.first, phase)), format_bytes(getattr(phases.steady, phase))]
        )
    return lines


def _step_lines(result: Measurement) -> list[list[str]]:
    lines = []
    for name in ("peak_allocated_bytes", "peak_reserved_bytes", "peak_device_bytes"):
        if getattr(result, name) is not None:
            words = name.removesuffix("_bytes").replace("_", " ")
            lines.append([words, quantity(name, getattr(result, name)), ""])
    if result.step_s is not None:
        times = result.step_times
        spread = "" if times is None else (
            f"median of {len(times.samples)}; 10 % to 90 %: {format_seconds(times.low)} to {format_seconds(times.high)}"
        )  # fmt: skip
        lines.append(["time", format_seconds(result.step_s), spread])
    for name, words in (
        ("tokens_per_s", "tokens a second"),
        ("model_flops", "model FLOPs"),
        ("hardware_flops", "hardware FLOPs"),
    ):
        if getattr(result, name) is not None:
            lines.append([words, quantity(name, getattr(result, name)), ""])
    for name in ("mfu", "hfu"):
        if getattr(result, name) is not None:
            lines.append([name.upper(), quantity(name, getattr(result, name)), ""])
    if result.losses:
        lines.append(
            ["loss", f"{result.losses[-1]:.4f}", f"first {result.losses[0]:.4f}, {len(result.losses)} steps"]
        )
    return lines
