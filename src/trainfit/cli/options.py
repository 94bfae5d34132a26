"""Arguments, options and output that several verbs share."""

import contextlib
import json as json_format
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainfit.spec.printable import printable, say
from trainfit.spec.units import read_count, read_share

if TYPE_CHECKING:
    from pydantic import BaseModel

    from trainfit.spec.recipe import Recipe

EXIT_DOES_NOT_FIT = 1  # With --check


def finite(value: float | None) -> float | None:
    """Refuse nan and inf, which Python's float() accepts."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


def count(text: str) -> float:
    """Parse a count that may have a unit, such as ``100B``."""
    return _parsed(read_count, text)


def share(text: str | float) -> float:
    """Parse a share that may be in per cent, such as ``40%``; a default is a number."""
    return _parsed(read_share, str(text))


def _parsed(read: Callable[[str], float], text: str) -> float:
    try:
        return read(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


RECIPE_HELP = (
    "A recipe file, a model's config.json (every other field at its default), or the name of a shipped "
    "recipe or catalog model (also the model's name on the Hub)."
)
RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help=RECIPE_HELP)]
SET_HELP = "Set a recipe's field, such as batch.micro=8."
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help=SET_HELP)]
GPU_HELP = "Same as --set hardware.gpu=NAME."
GpuOption = Annotated[str | None, typer.Option("--gpu", metavar="NAME", help=GPU_HELP)]
# Text, so that the recipe's own checks refuse a bad value as they do with --set.
Count = Annotated[str | None, typer.Option("--count", metavar="N", help="Same as --set hardware.count=N.")]
Seq = Annotated[str | None, typer.Option("--seq", metavar="S", help="Same as --set batch.seq=S.")]
PRICE_HELP = "Price of one GPU-hour; default: the catalog's."
Price = Annotated[
    float | None, typer.Option("--price", metavar="USD", min=0, callback=finite, help=PRICE_HELP)
]
PEAK_HELP = "The device's dense peak, for MFU and HFU."
PeakFlops = Annotated[
    float | None, typer.Option("--peak-flops", metavar="FLOP/S", min=1, callback=finite, help=PEAK_HELP)
]
Device = Annotated[str, typer.Option("--device", metavar="NAME", help="auto, cpu, cuda or cuda:1.")]
CALIBRATION_HELP = "Time the step with what trainfit calibrate wrote here."
CalibrationFile = Annotated[
    Path | None, typer.Option("--calibration", metavar="FILE.json", help=CALIBRATION_HELP)
]
Check = Annotated[bool, typer.Option("--check", help="Exit with 1 where it does not fit.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
RECORD_HELP = "Append the result to this SQLite file."
RecordFile = Annotated[Path | None, typer.Option("--record", metavar="FILE", help=RECORD_HELP)]


FIELDS = {
    "hardware.gpu": "--gpu",
    "hardware.count": "--count",
    "batch.seq": "--seq",
    "hardware.price_per_hour": "--price",
}
"""Fields of a recipe that options of their own set."""


def with_fields(
    settings: list[str] | None,
    gpu: str | None,
    num_gpus: str | None,
    seq: str | None,
    price: float | None = None,
) -> list[str]:
    """Return the values of ``--set`` with those of ``--gpu``, ``--count``, ``--seq`` and ``--price``."""
    # JSON text is YAML text: a name with a colon or a hash in it stays one value.
    more = [f"hardware.gpu={json_format.dumps(gpu)}"] if gpu is not None else []
    more += [f"hardware.count={num_gpus}"] if num_gpus is not None else []
    more += [f"batch.seq={seq}"] if seq is not None else []
    more += [f"hardware.price_per_hour={price}"] if price is not None else []
    return [*(settings or []), *more]


def read_recipe(text: str, settings: list[str] | None = None) -> "Recipe":
    """Return the recipe that ``text`` names (``api.recipes.read``); print its notes to standard error."""
    from trainfit.api.recipes import read

    recipe, notes = read(text, settings or [])
    print_notes(f"note: {note}" for note in notes)
    return recipe


@contextlib.contextmanager
def work(recipe: str, settings: list[str] | None, *, json: bool, record: Path | None) -> Iterator[None]:
    """Surround a verb's work on a recipe: errors name the recipe, and ``--json`` keeps standard output free.

    A ``record`` file that cannot be appended to is refused before the work begins.
    """
    if record is not None:
        from trainfit.records import check_can_append

        check_can_append(record)
    from trainfit.api.recipes import named

    with named(recipe, settings or []), only_json(json):
        yield


def only_json(wanted: bool) -> AbstractContextManager[Any]:
    """Redirect what libraries print to standard error if ``--json`` is wanted."""
    return contextlib.redirect_stdout(sys.stderr) if wanted else contextlib.nullcontext()


def print_json(value: "BaseModel | dict[str, Any] | list[Any]") -> None:
    """Print one JSON value on one line."""
    data = value if isinstance(value, dict | list) else value.model_dump(mode="json")
    # JSON in ASCII escapes all control characters but DEL.
    say(json_format.dumps(data, allow_nan=False).replace("\x7f", "\\u007f"))


def print_notes(lines: "Iterable[str]") -> None:
    """Print notes to standard error: standard output is the result's."""
    for line in lines:
        say(printable(line), err=True)


def keep(path: Path | None, kind: Any, recipe: "Recipe", **result: Any) -> None:
    """Append a record of ``result`` (estimate, measurement or train) to ``path``, if one is given."""
    if path is not None:
        from trainfit.records import append
        from trainfit.spec.provenance import new_record

        append(path, new_record(kind, recipe, **result))
