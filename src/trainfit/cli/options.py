"""What the verbs share: the RECIPE argument, ``--set``, ``--json``, ``--record``; and how each is answered."""

import contextlib
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainfit.spec.printable import printable, say

if TYPE_CHECKING:
    from pydantic import BaseModel

    from trainfit.spec.recipe import Recipe


HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
"""A repository on the Hub: its owner and its name."""
UNNAMED_GPU = "this GPU, whose name NVML does not tell,"
"""In the place of a name: nothing is measured on it."""


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
    """The recipe that ``text`` names: a file, else a shipped recipe, else a catalog model with every default.

    A model's config.json (or its folder) is that model with every default.

    Raises:
        InputError: no such name, or wrong content.
        OSError: the file cannot be read.
    """
    from trainfit.catalog import load as catalog
    from trainfit.spec.recipe_file import load_recipe, recipe_from, recipe_of_model

    settings, notes = settings or [], list[str]()
    if _is_model_config(Path(text)):
        recipe = recipe_of_model(text, settings, notes=notes)
    elif _is_path(text):
        recipe = load_recipe(text, settings, notes=notes)
    else:
        path = _shipped(text)
        recipe = (
            recipe_from({"model": {"config": text}}, settings, notes=notes)
            if path is None
            else load_recipe(path, settings, notes=notes)
        )
    tell(f"note: {note}" for note in notes)
    with _named(text, settings):  # Before anything slow is imported.
        catalog.gpu(recipe.hardware.gpu)
        catalog.model_config(recipe.model.config)
    return recipe


def _is_path(text: str) -> bool:
    """Whether it names a file, there or not; what has the form of a name on the Hub (``owner/name``) only if it is there."""
    if text.endswith((".yaml", ".yml", ".json")) or Path(text).is_file():
        return True
    return "/" in text and not (HUB_NAME.fullmatch(text) and not Path(text).parent.is_dir())


def _is_model_config(path: Path) -> bool:
    """Whether the file, or ``config.json`` in the folder, is a model's config.json and no recipe."""
    from trainfit.spec.recipe_file import read_json

    if path.is_dir():
        return (path / "config.json").is_file()
    if path.suffix != ".json" or not path.is_file():
        return False
    data = read_json(path)
    return isinstance(data, dict) and "model_type" in data and "model" not in data


@contextlib.contextmanager
def _named(text: str, settings: list[str] | None) -> Iterator[None]:
    """An error about a field of the recipe names the recipe, or ``--set`` where a setting said the value."""
    from trainfit.spec.errors import InputError
    from trainfit.spec.recipe import Recipe

    try:
        yield
    except InputError as error:
        if error.field.partition(".")[0] not in Recipe.model_fields:
            raise
        keys = [setting.partition("=")[0].strip() for setting in settings or []]
        by_setting = any(f"{error.field}.".startswith(f"{key}.") for key in keys)
        raise error.in_file("--set" if by_setting else text) from error.__cause__


def _quoted(text: str) -> str:
    """As JSON text, which is YAML text: a name with a colon or a hash in it stays one value."""
    import json

    return json.dumps(text)


def _shipped(name: str) -> Path | None:
    """The shipped recipe's file, or None where ``name`` is a model of the catalog."""
    from trainfit.catalog import load as catalog
    from trainfit.spec.errors import InputError
    from trainfit.spec.names import find_model

    recipes = catalog.recipes()
    folded = name.lower().replace("_", "-")
    if folded in recipes or find_model(name) is not None:
        return recipes.get(folded)
    near = catalog.names_like(name, [*recipes, *catalog.model_names()])
    known = f"did you mean {', '.join(near)}?" if near else f"shipped recipes: {', '.join(recipes)}"
    raise InputError(
        "no file, shipped recipe or catalog model of that name", known, field="RECIPE", value=name
    )


@contextlib.contextmanager
def work(recipe: str, settings: list[str] | None, *, json: bool, record: Path | None) -> Iterator[None]:
    """A verb's work on a recipe: errors name it, and for ``--json`` standard output stays free.

    ``record``: where the result is to be kept; if it cannot be, the work does not begin.
    """
    if record is not None:
        from trainfit.records import check_can_append

        check_can_append(record)
    with _named(recipe, settings), only_json(json):
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


def planned(recipe: "Recipe", device: str | None = None) -> "tuple[Recipe, tuple[str, ...]]":
    """The recipe with its open fields planned (``recompute: {budget_gib: x}``, ``attention: best``), and what to say of it.

    That is how they were planned, and what of the model's config is ignored.

    Args:
        device: where a real step is about to run (``auto``, ``cpu``, ``cuda``, ``cuda:1``); None: nowhere, it is predicted.

    Raises:
        InputError: no plan is within the budget.
    """
    from trainfit.catalog.config_checks import ignored

    said = ignored(recipe.model.config)
    if not recipe.has_open_fields:
        return recipe, said
    if recipe.attention == "best":
        from trainfit.planning.attention import choose

        place = {} if device is None else _place(device)
        recipe, note = choose(recipe, **place)
        said += (note,)
    from trainfit.planning.recompute import resolve

    built = resolve(recipe)
    if built.recompute != recipe.recompute:
        from trainfit.cli.words import recompute_written

        words = [recompute_written(one.recompute) for one in (recipe, built)]
        said += (f"recompute: {words[0]} is planned as {words[1]}",)
    return built, said


def _place(device: str) -> dict[str, Any]:
    """The real device's type and the GPU's name: the catalog's, else the driver's, else words that no measurement goes by.

    Raises:
        InputError: no such device.
    """
    from trainfit.catalog.load import gpu_of_device
    from trainfit.measurement.environment import runs_on_cuda
    from trainfit.measurement.nvml import Nvml
    from trainfit.measurement.run import DEVICE
    from trainfit.spec.errors import InputError

    if not DEVICE.fullmatch(device):
        raise InputError("no such device", "use auto, cpu, cuda or cuda:1", field="device", value=device)
    if not runs_on_cuda(device):
        return {"device_type": "cpu"}
    name = Nvml(int(device.partition(":")[2] or 0)).name()
    if name is None:  # The recipe's GPU need not be this one.
        return {"gpu": UNNAMED_GPU, "device_type": "cuda"}
    try:
        return {"gpu": gpu_of_device(name).name, "device_type": "cuda"}
    except InputError:  # No GPU of the catalog: nothing is measured on it, which the note says by this name.
        return {"gpu": name, "device_type": "cuda"}


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
