"""What the verbs share: the RECIPE argument, ``--set``, ``--json``, ``--record``; and how each is answered."""

import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainfit.spec.printable import printable, say

if TYPE_CHECKING:
    from pydantic import BaseModel

    from trainfit.spec.recipe import Recipe


def finite(value: float | None) -> float | None:
    """Refuses nan and inf, which Python's float() takes from the command line."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


def count(text: str) -> float:
    """An option's count, which may have a unit: ``100B``."""
    from trainfit.spec.units import read_count

    return _read(read_count, text)


def share(text: str) -> float:
    """An option's share, which may be in per cent: ``40%``."""
    from trainfit.spec.units import read_share

    return _read(read_share, text)


def _read(read: Callable[[str], float], text: str) -> float:
    try:
        return read(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="A recipe file, a model's config.json (every other field at its default), or the name of a shipped "
        "recipe or catalog model (also the model's name on the Hub).",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Set a recipe's field, such as batch.micro=8."),
]
GpuOption = Annotated[
    str | None, typer.Option("--gpu", metavar="NAME", help="Same as --set hardware.gpu=NAME.")
]
PriceOption = Annotated[
    float | None,
    typer.Option(
        "--price", metavar="USD", min=0, callback=finite, help="Your price of one GPU for one hour."
    ),
]
PeakFlops = Annotated[
    float | None,
    typer.Option(
        "--peak-flops",
        metavar="FLOP/S",
        min=1,
        callback=finite,
        help="The device's dense peak, for MFU and HFU.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
RecordFile = Annotated[
    Path | None, typer.Option("--record", metavar="FILE", help="Append the result to this SQLite file.")
]


def with_hardware(settings: list[str] | None, gpu: str | None, price: float | None) -> list[str]:
    """``--set`` with what ``--gpu`` and ``--price`` say added to it."""
    more = [f"hardware.gpu={_quoted(gpu)}"] if gpu is not None else []
    more += [f"hardware.price_per_hour={price}"] if price is not None else []
    return [*(settings or []), *more]


def read_recipe(text: str, settings: list[str] | None = None) -> "Recipe":
    """Return the recipe that ``text`` names, as ``api.recipes.read`` finds it; its notes go to standard error."""
    from trainfit.api.recipes import read

    recipe, notes = read(text, settings or [])
    tell(f"note: {note}" for note in notes)
    return recipe


def _quoted(text: str) -> str:
    """As JSON text, which is YAML text: a name with a colon or a hash in it stays one value."""
    import json

    return json.dumps(text)


@contextlib.contextmanager
def work(recipe: str, settings: list[str] | None, *, json: bool, record: Path | None) -> Iterator[None]:
    """A verb's work on a recipe: errors name it, and for ``--json`` standard output stays free.

    ``record``: where the result is to be kept; if it cannot be, the work does not begin.
    """
    if record is not None:
        from trainfit.records import check_can_append

        check_can_append(record)
    from trainfit.api.recipes import named

    with named(recipe, settings or []), only_json(json):
        yield


@contextlib.contextmanager
def only_json(wanted: bool) -> Iterator[None]:
    """While work runs for ``--json``, anything a library prints goes to stderr."""
    with contextlib.redirect_stdout(sys.stderr) if wanted else contextlib.nullcontext():
        yield


def print_json(value: "BaseModel | dict[str, Any] | list[Any]") -> None:
    """One JSON value on one line."""
    import json

    data = value if isinstance(value, dict | list) else value.model_dump(mode="json")
    # ASCII: JSON leaves only DEL of the control characters as it is.
    say(json.dumps(data, allow_nan=False).replace("\x7f", "\\u007f"))


def tell(said: "Iterable[str]") -> None:
    """What a plan chose, on standard error: standard output is the result's."""
    for line in said:
        say(printable(line), err=True)


def keep(path: Path | None, kind: Any, recipe: "Recipe", **result: Any) -> None:
    """Append a record of ``result`` (estimate, measurement or train) to ``path``, if one is given."""
    if path is None:
        return
    from trainfit.records import append
    from trainfit.spec.provenance import new_record

    append(path, new_record(kind, recipe, **result))
