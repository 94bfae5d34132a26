"""``trainfit predict``: memory, FLOPs, time and cost of a recipe, without a GPU.

Torch is imported only if the ledger is not cached.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from trainfit.cli import options
from trainfit.cli.options import (
    EXIT_DOES_NOT_FIT,
    Check,
    Json,
    RecipeArgument,
    RecordFile,
    Settings,
    takes_recipe,
)
from trainfit.spec.errors import InputError

if TYPE_CHECKING:
    from trainfit.api.results import Prediction
    from trainfit.prediction.time.calibrated import OwnCalibration
    from trainfit.spec.recipe import Recipe

DETERMINISTIC = "Predict kernels that repeat bit by bit, which train requests by default."
VERBOSE = "Also print conventions, assumptions, the basis of the bounds, and the ledger's file."
ADVICE_HELP = "Where it does not fit, name changes and GPUs with which it would. Default: not with --json."
ADVISING = "predicting what would fit (a minute at most; --no-advice leaves it out)"
MEAN_NEW_HELP = "Of objective grpo or ppo: tokens of a completion on average. Default: half of max_new."
LENGTHS_HELP = "Of objective grpo or ppo: lengths that a run of train recorded in its folder, not a mean."
TOKENS_HELP = "Also print the time and cost of a run over N tokens, such as 15T or 1.5e12."


@takes_recipe
def run(
    recipe: RecipeArgument,
    settings: Settings = None,
    tokens: Annotated[float | None, Option(metavar="N", parser=options.count, help=TOKENS_HELP)] = None,
    mean_new: Annotated[float | None, Option("--mean-new", metavar="N", help=MEAN_NEW_HELP)] = None,
    lengths: Annotated[Path | None, Option("--lengths", metavar="FOLDER", help=LENGTHS_HELP)] = None,
    calibration: options.CalibrationFile = None,
    json: Json = False,
    record: RecordFile = None,
    deterministic: Annotated[bool, Option("--deterministic", help=DETERMINISTIC)] = False,
    no_cache: Annotated[bool, Option("--no-cache", help="Trace again, even if a ledger is cached.")] = False,
    check: Check = False,
    advice: Annotated[bool | None, Option("--advice/--no-advice", help=ADVICE_HELP)] = None,
    verbose: Annotated[bool, Option("--verbose", "-v", help=VERBOSE)] = False,
) -> int:
    """Predict a recipe's memory, FLOPs, time and cost. Needs no GPU."""
    if tokens is not None and tokens <= 0:
        raise typer.BadParameter("--tokens must be above 0")
    found: list[Prediction | InputError] = []
    given = options.variants(settings or [])
    several = len(given) > 1
    requested = [options.read_recipe(recipe, one) for one in given]
    from trainfit.prediction.time.calibrated import own_calibration  # Reads the catalog: after the recipe.

    own = own_calibration(calibration)
    for wanted, its_settings in zip(requested, given, strict=True):
        try:
            with options.work(recipe, its_settings, json=json, record=record):
                found.append(
                    _predict(
                        wanted, own, deterministic, use_cache=not no_cache, mean_new=mean_new, lengths=lengths
                    )
                )
        except InputError as error:
            if not several:
                raise
            found.append(error)
    failure = options.attempt(lambda: _keep(found, record))
    if several or isinstance(found[0], InputError):
        _compare(requested, found, tokens, json=json)
    else:
        advised = not json if advice is None else advice
        _show(found[0], tokens, json=json, verbose=verbose, advice=advised)
        if verbose and not json:
            options.print_notes([_ledger_file(found[0], deterministic)])
    if failure is not None:
        raise failure
    fits = all(not isinstance(one, InputError) and one.fits for one in found)
    return EXIT_DOES_NOT_FIT if check and not fits else 0


def _predict(
    recipe: "Recipe",
    calibration: "OwnCalibration | None",
    deterministic: bool,
    *,
    use_cache: bool,
    mean_new: float | None,
    lengths: Path | None,
) -> "Prediction":
    from trainfit.api.calls import predict_recipe
    from trainfit.report.console import progress

    name = recipe.model.display_name
    with progress(f"predicting {name} on {recipe.hardware.gpu}: one step on the virtual GPU"):
        return predict_recipe(
            recipe, calibration, deterministic=deterministic, use_cache=use_cache, mean_new=mean_new,
            lengths=lengths,
        )  # fmt: skip


def _ledger_file(estimate: "Prediction", deterministic: bool) -> str:
    """Return a line that names the file of the prediction's ledger."""
    from trainfit.prediction import cache
    from trainfit.spec.files import cache_folder

    if estimate.recipe.mesh.pipeline > 1:
        return f"ledgers, one a stage: in {cache_folder()}"
    return f"ledger: {cache.path_of(estimate.recipe, deterministic=deterministic)}"


def _keep(found: "list[Prediction | InputError]", record: Path | None) -> None:
    for one in found:
        if not isinstance(one, InputError):
            options.keep(record, "predict", one.recipe, estimate=one)


def _show(estimate: "Prediction", tokens: float | None, *, json: bool, verbose: bool, advice: bool) -> None:
    run = None if tokens is None else estimate.run(tokens)
    advised = advice and not estimate.fits and estimate.step_s is not None
    if json:
        content = estimate.model_dump(mode="json")
        content |= {} if run is None else {"run": run.model_dump(mode="json")}
        if advised:
            with options.only_json(json):
                content["advice"] = estimate.advice().model_dump(mode="json")
        options.print_json(content)
        return
    from trainfit.report.console import progress
    from trainfit.report.prediction_text import show, show_advice

    show(estimate.recipe, estimate, run=run, notes=estimate.notes, assumed=estimate.assumed, verbose=verbose)
    if advised:
        with progress(ADVISING) as say:
            found = estimate.advice(lambda text: say(f"{ADVISING}: {text}"))
        show_advice(estimate.recipe, found)


def _compare(
    recipes: "list[Recipe]", found: "list[Prediction | InputError]", tokens: float | None, *, json: bool
) -> None:
    from trainfit.api.comparisons import GpuComparison
    from trainfit.report.gpus import show

    compared = GpuComparison.of(recipes, found, tokens)
    if json:
        options.print_json(compared.model_dump(mode="json"))
    else:
        show(recipes[0], compared.gpus, tokens)
