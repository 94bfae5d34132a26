"""``trainfit predict``: memory, FLOPs, time and cost of a recipe, without a GPU.

Torch is imported only if the ledger is not cached.
"""

import typer

from trainfit.cli import options
from trainfit.cli.options import EXIT_DOES_NOT_FIT, Check, Json, RecipeArgument, RecordFile, Settings

DETERMINISTIC = "Predict kernels that repeat bit by bit, which train requests by default."
VERBOSE = "Also print conventions, assumptions and the basis of the bounds."


def run(
    recipe: RecipeArgument,
    settings: Settings = None,
    gpu: options.GpuOption = None,
    price: options.Price = None,
    json: Json = False,
    record: RecordFile = None,
    deterministic: bool = typer.Option(False, "--deterministic", help=DETERMINISTIC),
    no_cache: bool = typer.Option(False, "--no-cache", help="Trace again, even if a ledger is cached."),
    check: Check = False,
    verbose: bool = typer.Option(False, "--verbose", "-v", help=VERBOSE),
) -> int:
    """Predict a recipe's memory, FLOPs, time and cost. Needs no GPU."""
    settings = options.with_hardware(settings, gpu, price)
    requested = options.read_recipe(recipe, settings)
    from trainfit.report.console import progress

    with (
        options.work(recipe, settings, json=json, record=record),
        progress(f"predicting {requested.model.display_name}: one step on the virtual GPU"),
    ):
        from trainfit.api.calls import predict_recipe

        estimate = predict_recipe(requested, use_cache=not no_cache, deterministic=deterministic)
        options.keep(record, "predict", estimate.recipe, estimate=estimate)
    if json:
        options.print_json(estimate)
    else:
        from trainfit.report.prediction_text import show

        show(estimate.recipe, estimate, notes=estimate.notes, verbose=verbose)
    return EXIT_DOES_NOT_FIT if check and not estimate.fits else 0
