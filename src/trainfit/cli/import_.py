"""``trainfit import``: another tool's configuration becomes a recipe, every field accounted for."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from trainfit.cli import options
from trainfit.cli.options import Json, Settings
from trainfit.spec.errors import InputError

if TYPE_CHECKING:
    from trainfit.api.results import Prediction
    from trainfit.integrations.importers.run import ImportedConfig
    from trainfit.spec.plan import Advice
    from trainfit.spec.recipe import Recipe

FILES_HELP = (
    "A config of axolotl, LLaMA-Factory, torchtune, torchtitan, transformers or TRL (JSON, YAML or a "
    "script), PEFT, DeepSpeed or accelerate; several files of one run together. FILE.py:NAME is a function "
    "or line of it."
)
MODEL_HELP = "The model, in place of the one in the files: a catalog or Hub name, or a config.json."
TOOL_HELP = "The tool of the first FILE, where its fields do not tell."
OUT_HELP = "Write the recipe to this file, which must not exist."
PREDICT_HELP = "Also predict the recipe, as trainfit predict does."
ADVISING = "predicting what would fit (a minute at most)"
VERBOSE = "Also name the fields without influence, and those left empty."


@options.takes_recipe
def run(
    files: Annotated[list[str], Argument(metavar="FILE...", help=FILES_HELP)],
    model: Annotated[str | None, Option("--model", metavar="NAME", help=MODEL_HELP)] = None,
    tool: Annotated[str | None, Option("--tool", metavar="NAME", help=TOOL_HELP)] = None,
    settings: Settings = None,
    out: Annotated[Path | None, Option("--out", "-o", metavar="FILE.yaml", help=OUT_HELP)] = None,
    predict: Annotated[bool, Option("--predict", help=PREDICT_HELP)] = False,
    check: options.Check = False,
    json: Json = False,
    verbose: Annotated[bool, Option("--verbose", "-v", help=VERBOSE)] = False,
) -> int:
    """Turn another tool's config into a recipe; name what it has no field for. Needs no GPU.

    --gpu, --count, --batch and --seq state what the files leave open. Nothing in a file is executed.
    """
    from trainfit.integrations.importers.run import imported, on_one_gpu

    if check and not predict:
        raise InputError("there is no prediction to check", "add --predict", field="--check")
    if out is not None:
        check_new(out)
    found = imported(files, settings or [], model, tool)
    text = found.written()
    if out is not None:
        write_new(out, text)
    estimate = _predict(found.recipe, json=json) if predict else None
    if json:
        content = {**found.model_dump(mode="json"), "text": text}
        content |= {} if estimate is None else {"estimate": estimate.model_dump(mode="json")}
        options.print_json(content)
    else:
        alone = on_one_gpu(found, files, settings or [], model, tool) if estimate is not None else None
        _show(found, estimate, text, out, files, alone, verbose=verbose)
    return options.EXIT_DOES_NOT_FIT if check and estimate is not None and not estimate.fits else 0


def check_new(path: Path) -> None:
    """Refuse a file that exists or could not be written."""
    from trainfit.spec.files import check_can_write

    if path.exists() or path.is_symlink():
        raise InputError("exists already", "name another file, or remove it", field="--out", value=str(path))
    check_can_write(path, "--out")


def write_new(path: Path, text: str) -> None:
    """Write a file that must not exist, not even since it was checked."""
    from trainfit.spec.files import writing

    try:
        with writing(path), path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise InputError(
            "exists already", "name another file, or remove it", field="--out", value=str(path)
        ) from None


def _predict(recipe: "Recipe", *, json: bool = False) -> "Prediction":
    from trainfit.api.calls import predict_recipe
    from trainfit.integrations.importers.run import predictable
    from trainfit.report.console import progress

    name, gpu = recipe.model.display_name, recipe.hardware.gpu
    with options.only_json(json), progress(f"predicting {name} on {gpu}: one step on the virtual GPU"):
        recipe, note = predictable(recipe)
        options.print_notes([f"note: {note}"] if note else [])
        return predict_recipe(recipe)


def _what_fits(
    estimate: "Prediction", alone: "ImportedConfig | None"
) -> "tuple[list[tuple[str, int]], Advice | None]":
    """Return the changes that a verdict names, with bytes on the device, and all of the advice.

    Args:
        alone: the files' recipe for one GPU, whose host memory several GPUs do not have here.
    """
    if estimate.fits or estimate.step_s is None:
        return [], None
    from trainfit.report.console import progress

    fitting: list[tuple[str, int]] = []
    if alone is not None and (one := _predict(alone.recipe)).fits:
        offloads = [f"offload.{name}: true" for name, is_on in alone.recipe.offload if is_on]
        fitting.append((", ".join(["hardware.count: 1", *offloads]), one.highest.device))
    with progress(ADVISING) as say:
        advice = estimate.advice(lambda text: say(f"{ADVISING}: {text}"))
    found = [one for one in (advice.gpus, advice.gpu, *advice.changes) if one is not None]
    fitting += [(", ".join(one.changes), one.estimate.highest.device) for one in found[:1]]
    return fitting, advice


def _show(
    found: "ImportedConfig", estimate: "Prediction | None", text: str, out: Path | None, files: list[str],
    alone: "ImportedConfig | None", *, verbose: bool,
) -> None:  # fmt: skip
    from rich.text import Text

    from trainfit.report.console import console, heading
    from trainfit.report.imported_text import caveat, show

    screen = console()
    show(found, taken=estimate is None or verbose, verbose=verbose, out=screen)
    if out is None and estimate is None:
        heading(screen, "Recipe")
        screen.print(Text("".join(f"  {line}\n" for line in text.splitlines()).rstrip("\n")))
    if estimate is not None:
        from trainfit.report import prediction_text

        fitting, advice = _what_fits(estimate, alone)
        ends = caveat(found, fitting)
        screen.print()
        prediction_text.show(
            estimate.recipe, estimate, notes=estimate.notes, assumed=estimate.assumed, caveat=ends, out=screen
        )
        if advice is not None:
            prediction_text.show_advice(estimate.recipe, advice, screen)
    screen.print()
    if out is not None:
        screen.print(Text(f"wrote {out}; next: trainfit predict {shlex.quote(str(out))}"))
    elif estimate is None:
        named = " ".join(shlex.quote(one) for one in files)
        screen.print(Text(f"next: trainfit import {named} --out recipe.yaml, or --predict"))
