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

FILES_HELP = (
    "A config of axolotl, LLaMA-Factory, torchtune, torchtitan, transformers or TRL (JSON, YAML or a "
    "script), PEFT, DeepSpeed or accelerate; several files of one run together. FILE.py:NAME is a function "
    "or line of it."
)
MODEL_HELP = "The model, in place of the one in the files: a catalog or Hub name, or a config.json."
TOOL_HELP = "The tool of the first FILE, where its fields do not tell."
OUT_HELP = "Write the recipe to this file, which must not exist."
PREDICT_HELP = "Also predict the recipe, as trainfit predict does."
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
    from trainfit.integrations.importers.run import imported

    if check and not predict:
        raise InputError("there is no prediction to check", "add --predict", field="--check")
    if out is not None:
        check_new(out)
    found = imported(files, settings or [], model, tool)
    text = found.written()
    if out is not None:
        write_new(out, text)
    estimate = _predict(found, json=json) if predict else None
    if json:
        content = {**found.model_dump(mode="json"), "text": text}
        content |= {} if estimate is None else {"estimate": estimate.model_dump(mode="json")}
        options.print_json(content)
    else:
        _show(found, estimate, text, out, files, verbose=verbose)
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


def _predict(found: "ImportedConfig", *, json: bool) -> "Prediction":
    from trainfit.api.calls import predict_recipe
    from trainfit.integrations.importers.run import predictable
    from trainfit.report.console import progress

    name, gpu = found.recipe.model.display_name, found.recipe.hardware.gpu
    with options.only_json(json), progress(f"predicting {name} on {gpu}: one step on the virtual GPU"):
        recipe, note = predictable(found.recipe)
        options.print_notes([f"note: {note}"] if note else [])
        return predict_recipe(recipe)


def _show(
    found: "ImportedConfig", estimate: "Prediction | None", text: str, out: Path | None, files: list[str], *,
    verbose: bool,
) -> None:  # fmt: skip
    from rich.text import Text

    from trainfit.report.console import console, heading
    from trainfit.report.imported_text import show

    screen = console()
    show(found, taken=estimate is None or verbose, verbose=verbose, out=screen)
    if out is None and estimate is None:
        heading(screen, "Recipe")
        screen.print(Text("".join(f"  {line}\n" for line in text.splitlines()).rstrip("\n")))
    if estimate is not None:
        from trainfit.report.prediction_text import show as show_prediction

        screen.print()
        show_prediction(estimate.recipe, estimate, notes=estimate.notes, assumed=estimate.assumed, out=screen)
    screen.print()
    if out is not None:
        screen.print(Text(f"wrote {out}; next: trainfit predict {shlex.quote(str(out))}"))
    elif estimate is None:
        named = " ".join(shlex.quote(one) for one in files)
        screen.print(Text(f"next: trainfit import {named} --out recipe.yaml, or --predict"))
