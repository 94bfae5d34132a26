"""``trainfit measure``: one recipe's step on this machine, in a process of its own."""

from typing import TYPE_CHECKING, Annotated

import typer

from trainfit.cli.options import (
    Json,
    PeakFlops,
    RecipeArgument,
    RecordFile,
    Settings,
    finite,
    keep,
    planned,
    print_json,
    read_recipe,
    tell,
    work,
)
from trainfit.spec.errors import EXIT_BAD_INPUT

if TYPE_CHECKING:
    from trainfit.spec.recipe import Recipe
    from trainfit.spec.result import Measurement

EXIT_CODES = {"done": 0, "out-of-memory": EXIT_BAD_INPUT, "timeout": 75, "crashed": 70}
"""By the trial's status, as for ``train``: 65 the recipe does not work here; 75 stopped early; 70 a bug."""


def register(app: typer.Typer) -> None:
    app.command("measure")(run)


def run(
    recipe: RecipeArgument,
    settings: Settings = None,
    steps: Annotated[int, typer.Option(min=0, metavar="N", help="Timed steps.")] = 10,
    warmup: Annotated[int, typer.Option(min=0, metavar="N", help="Untimed steps before them.")] = 3,
    device: Annotated[str, typer.Option(metavar="NAME", help="auto, cpu, cuda or cuda:1.")] = "auto",
    timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0, callback=finite, help="End the trial after so long."),
    ] = None,
    peak_flops: PeakFlops = None,
    json: Json = False,
    record: RecordFile = None,
) -> int:
    """Measure a recipe's memory and time on this machine.

    Whatever becomes of the trial is printed and recorded; the exit code says it too: 0 done, 65 out of memory, 75 the
    time limit ended it, 70 it crashed.
    """
    asked = read_recipe(recipe, settings)
    from trainfit.cli.flops import step_flops
    from trainfit.measurement.run import measure

    with work(recipe, settings, json=json, record=record):
        asked, said = planned(asked, device)
        tell(said)
        model, hardware, peak = step_flops(asked, device, peak_flops)
        result = measure(
            asked, steps=steps, warmup=warmup, device=device, timeout_s=timeout,
            model_flops=model, hardware_flops=hardware, peak_flops_per_s=peak,
        )  # fmt: skip
        keep(record, "measure", asked, measurement=result)
    if json:
        print_json(result)
    else:
        show(asked, result)
    return EXIT_CODES[result.status]


def show(recipe: "Recipe", result: "Measurement") -> None:
    """The measurement for people: status, memory by phase, times with their spread, where it was made."""
    from trainfit.cli.show import console, heading, rows
    from trainfit.cli.words import describe
    from trainfit.spec.units import format_bytes, format_count

    out = console()
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


def _software(result: "Measurement") -> list[tuple[str, str | None]]:
    where = result.environment
    return [
        ("torch", where.torch),
        ("CUDA", where.cuda),
        ("driver", where.driver),
        ("transformers", where.transformers),
    ]


def _phase_lines(result: "Measurement") -> list[list[str]]:
    from trainfit.spec.result import PHASES
    from trainfit.spec.units import format_bytes

    assert result.phases is not None
    phases = result.phases
    lines = [["", "first step", "steady step"], ["after init", format_bytes(phases.after_init), ""]]
    for phase in PHASES:
        lines.append(
            [phase, format_bytes(getattr(phases.first, phase)), format_bytes(getattr(phases.steady, phase))]
        )
    return lines


def _step_lines(result: "Measurement") -> list[list[str]]:
    from trainfit.cli.words import quantity
    from trainfit.spec.units import format_seconds

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
