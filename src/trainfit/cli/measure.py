"""``trainfit measure``: one recipe's step on this machine, in a process of its own."""

from typing import Annotated

import typer

from trainfit.cli.options import (
    Json,
    PeakFlops,
    RecipeArgument,
    RecordFile,
    Settings,
    finite,
    keep,
    print_json,
    read_recipe,
    tell,
    work,
)
from trainfit.spec.errors import EXIT_BAD_INPUT

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
    from trainfit.api.calls import measure_built
    from trainfit.api.planned import planned

    with work(recipe, settings, json=json, record=record):
        asked, said = planned(asked, device)
        tell(said)
        result = measure_built(
            asked, said, steps=steps, warmup=warmup, device=device, timeout_s=timeout, peak_flops=peak_flops
        )
        keep(record, "measure", asked, measurement=result)
    if json:
        print_json(result)
    else:
        from trainfit.report.results import show_measurement

        show_measurement(asked, result)
    return EXIT_CODES[result.status]
