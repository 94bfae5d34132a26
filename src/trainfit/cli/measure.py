"""``trainfit measure``: memory and time of a recipe's step on this machine, in a process of its own."""

from typing import Annotated

from typer import Option

from trainfit.cli import options
from trainfit.cli.options import Json, PeakFlops, RecipeArgument, RecordFile, Settings, at_most, finite
from trainfit.spec.errors import EXIT_BAD_INPUT

EXIT_CODES = {"done": 0, "out-of-memory": EXIT_BAD_INPUT, "timeout": 75, "crashed": 70}
"""Exit code by the trial's status: 65 the recipe does not work here; 75 stopped early; 70 a bug."""


@options.takes_recipe
def run(
    recipe: RecipeArgument,
    settings: Settings = None,
    steps: Annotated[int, Option(min=0, callback=at_most, metavar="N", help="Timed steps.")] = 10,
    warmup: Annotated[
        int, Option(min=0, callback=at_most, metavar="N", help="Untimed steps before them.")
    ] = 3,
    device: options.Device = "auto",
    timeout: Annotated[
        float | None, Option(metavar="SECONDS", min=0, callback=finite, help="End the trial after this time.")
    ] = None,
    peak_flops: PeakFlops = None,
    json: Json = False,
    record: RecordFile = None,
    force: options.Force = False,
) -> int:
    """Measure a recipe's memory and time on this machine.

    Every outcome of the trial is printed and recorded. Exit codes: 0 done, 65 out of memory, 75 time limit,
    70 crashed.
    """
    requested = options.read_recipe(recipe, settings)
    from trainfit.api.calls import measure_built
    from trainfit.api.planned import planned
    from trainfit.report.console import progress

    name = requested.model.display_name
    with (
        options.work(recipe, settings, json=json, record=record),
        progress(f"measuring {name}: building it, {warmup} steps to warm up and {steps} timed ones"),
    ):
        built, notes = planned(requested, device)
        options.print_notes(notes)
        result = measure_built(
            built, notes, device, peak_flops, steps=steps, warmup=warmup, timeout_s=timeout,
            force=force,
        )  # fmt: skip
    failure = options.attempt(lambda: options.keep(record, "measure", built, measurement=result))
    if json:
        options.print_json(result)
    else:
        from trainfit.report.results import show_measurement

        show_measurement(built, result)
    if failure is not None:
        raise failure
    return EXIT_CODES[result.status]
