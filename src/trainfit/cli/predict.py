"""``trainfit predict``: one recipe's memory, FLOPs, time and cost, without a GPU.

Torch is imported only where the ledger is not cached yet, by the prediction itself.
"""

import typer

from trainfit.cli.options import (
    GpuOption,
    Json,
    PriceOption,
    RecipeArgument,
    RecordFile,
    Settings,
    keep,
    print_json,
    read_recipe,
    with_hardware,
    work,
)

EXIT_DOES_NOT_FIT = 1
"""With ``--check``."""


def register(app: typer.Typer) -> None:
    app.command("predict")(run)


def run(
    recipe: RecipeArgument,
    settings: Settings = None,
    gpu: GpuOption = None,
    price: PriceOption = None,
    json: Json = False,
    record: RecordFile = None,
    deterministic: bool = typer.Option(
        False,
        "--deterministic",
        help="With kernels that repeat bit by bit, as train asks for unless told --no-deterministic.",
    ),
    no_cache: bool = typer.Option(False, "--no-cache", help="Trace anew, even where a ledger is cached."),
    check: bool = typer.Option(False, "--check", help="Exit with 1 where it does not fit."),
    verbose: bool = typer.Option(
        False, "--verbose", "-v", help="Also print conventions, assumptions and what the bounds rest on."
    ),
) -> int:
    """Predict a recipe's memory, FLOPs, time and cost. Needs no GPU."""
    settings = with_hardware(settings, gpu, price)
    asked = read_recipe(recipe, settings)
    from trainfit.report.console import progress

    with (
        work(recipe, settings, json=json, record=record),
        progress(f"predicting {asked.model.display_name}: one step on the virtual GPU"),
    ):
        from trainfit.api.calls import predict_recipe

        estimate = predict_recipe(asked, use_cache=not no_cache, deterministic=deterministic)
        keep(record, "predict", estimate.recipe, estimate=estimate)
    if json:
        print_json(estimate)
    else:
        from trainfit.report.prediction_text import show

        show(estimate.recipe, estimate, notes=estimate.notes, verbose=verbose)
    return EXIT_DOES_NOT_FIT if check and not estimate.fits else 0
