"""Arguments, options and output that several verbs share."""

import contextlib
import functools
import inspect
import json as json_format
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainfit.cli import completion
from trainfit.spec.printable import printable, say
from trainfit.spec.units import is_usual, read_count, read_seconds, read_share

if TYPE_CHECKING:
    from pydantic import BaseModel

    from trainfit.spec.errors import InputError
    from trainfit.spec.recipe import Recipe

FIELD = re.compile(r"[a-z_]+(\.[a-z_]+)?")  # The dotted name of a recipe's field
EXIT_DOES_NOT_FIT = 1  # With --check
MOST_COUNT = 2**24  # Of a recipe's whole numbers too (spec/value.py, which imports pydantic)


def finite(value: float | None) -> float | None:
    """Refuse nan and inf, which Python's float() accepts, and numbers beyond any real quantity."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    if value is not None and not is_usual(value):
        raise typer.BadParameter(f"{value:g} is beyond any quantity of training: correct it")
    return value


def at_most(value: int | None) -> int | None:
    """Refuse a whole number larger than any number of steps, sequences or GPUs."""
    if value is not None and value > MOST_COUNT:
        raise typer.BadParameter(f"write at most {MOST_COUNT:,}")
    return value


def count(text: str) -> float:
    """Parse a count that may have a unit, such as ``100B``."""
    return _parsed(read_count, text)


def share(text: str | float) -> float:
    """Parse a share that may be in per cent, such as ``40%``; a default is a number."""
    return _parsed(read_share, str(text))


def seconds(text: str | float) -> float:
    """Parse a duration, such as ``448ms`` or ``1.2s``; without a unit it is in seconds."""
    return _parsed(read_seconds, str(text))


def length(text: str | int) -> int:
    """Parse the tokens of a sequence, such as ``8k``, which is 8192."""
    from trainfit.spec.parsing.synonyms import tokens_of

    found = tokens_of(text)
    if not str(found).isdecimal() or int(found) < 1:
        raise typer.BadParameter(f"{text!r} is no number of tokens: write it as 8192 or 8k")
    return int(found)


def token_count(text: str) -> int:
    """Parse the tokens of a batch: ``4k`` is 4096, as of a sequence; ``1M`` and ``2.5B`` are decimal."""
    number = text.strip().removesuffix("k").removesuffix("K")
    found = count(text)  # Also refuses what is no number before its unit.
    return int(found if number == text.strip() else count(number) * 1024)


def _parsed(read: Callable[[str], float], text: str) -> float:
    try:
        return read(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


RECIPE_HELP = (
    "A recipe file, a model's config.json (every other field at its default), or the name of a shipped "
    "recipe or catalog model (also the model's name on the Hub)."
)
RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help=RECIPE_HELP, autocompletion=completion.recipes)
]
SET_HELP = "Set a recipe's field, such as batch.micro=8."
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help=SET_HELP, autocompletion=completion.fields),
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
FORCE_HELP = "Begin although the predicted step does not fit in this machine's memory."
Force = Annotated[bool, typer.Option("--force", help=FORCE_HELP)]
RECORD_HELP = "Append the result to this SQLite file."
RecordFile = Annotated[Path | None, typer.Option("--record", metavar="FILE", help=RECORD_HELP)]


@dataclass(frozen=True)
class RecipeOption:
    """An option that sets fields of a recipe, as ``--set`` does."""

    names: tuple[str, ...]
    metavar: str  # Empty: a flag
    settings: tuple[str, ...]  # Values of --set; {} is the option's own value
    more: str = ""  # Further help
    complete: Callable[[str], list[str]] | None = None  # Values that a shell completes

    @property
    def key(self) -> str:
        """The parameter's name in a function."""
        return self.names[0].lstrip("-")

    def values(self, value: str | bool) -> list[str]:
        """Return the values of ``--set`` that the option stands for."""
        # JSON text is YAML text: a name with a colon or a hash in it stays one value.
        text = "" if isinstance(value, bool) else json_format.dumps(value)[1:-1]
        return [setting.replace("{}", text) for setting in self.settings]

    def parameter(self) -> inspect.Parameter:
        """Return the function parameter from which typer makes the option."""
        settings = " --set ".join(self.settings).replace('"', "").replace("{}", self.metavar)
        help = f"Same as --set {settings}.{' ' * bool(self.more)}{self.more}"
        # Text, so that the recipe's own checks refuse a bad value as they do with --set.
        kind = Annotated[
            str | None,
            typer.Option(*self.names, metavar=self.metavar, help=help, autocompletion=self.complete),
        ]
        flag = Annotated[bool, typer.Option(*self.names, help=help)]
        kind, default = (kind, None) if self.metavar else (flag, False)
        return inspect.Parameter(self.key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


WEIGHTS_HELP = "A folder of safetensors, or a repository on the Hub."
SEVERAL = "predict and plan compare several, with commas between them."
RECIPE_OPTIONS = (
    RecipeOption(("--gpu",), "NAME", ('hardware.gpu="{}"',), SEVERAL, completion.gpus),
    RecipeOption(("--count", "--gpus"), "N", ("hardware.count={}",), SEVERAL),
    RecipeOption(("--batch",), "B", ("batch.micro={}",)),
    RecipeOption(("--seq",), "S", ("batch.seq={}",), "8k is 8192."),
    RecipeOption(("--weights",), "PATH", ('model.weights="{}"',), WEIGHTS_HELP),
    RecipeOption(("--precision",), "NAME", ('precision="{}"',), complete=completion.precisions),
    RecipeOption(("--lora",), "", ("adapter=lora",)),
    RecipeOption(("--qlora",), "", ("adapter=lora", "quantize=nf4")),
    RecipeOption(("--price",), "USD", ("hardware.price_per_hour={}",), "Default: the catalog's."),
)
"""Options of every verb that takes a recipe: one line each."""


def takes_recipe(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Give a verb the RECIPE_OPTIONS that it has no option of its own for; it gets them in ``settings``."""
    signature = inspect.signature(verb, eval_str=True)
    own = {
        name
        for parameter in signature.parameters.values()
        for one in getattr(parameter.annotation, "__metadata__", ())
        for name in getattr(one, "param_decls", None) or ()
    }
    options = [one for one in RECIPE_OPTIONS if not own & set(one.names)]

    @functools.wraps(verb)
    def run(**given: Any) -> Any:
        values = {one: given.pop(one.key, None) for one in options}
        named = {one: value for one, value in values.items() if value is not None and value is not False}
        settings = given.get("settings") or []
        check_apart(settings, named)
        more = [setting for one, value in named.items() for setting in one.values(value)]
        return verb(**{**given, "settings": [*settings, *more]})

    parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in signature.parameters.values()
    ]
    place = [parameter.name for parameter in parameters].index("settings")
    parameters[place:place] = [one.parameter() for one in options]
    changed: Any = run
    changed.__signature__ = signature.replace(parameters=parameters)
    changed.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return changed


def check_apart(settings: list[str], named: "dict[RecipeOption, Any]") -> None:
    """Refuse two of the options, or one and a ``--set``, that set the same field."""
    if not named:
        return
    from trainfit.spec.parsing.recipe_file import apply_settings, flat

    sources = {f"--set {setting}": [setting] for setting in settings}
    options = {one.names[0]: one.values(value) for one, value in named.items()}
    found: list[tuple[str, str]] = []
    for source, values in (sources | options).items():
        for field in flat(apply_settings({}, values)):
            for before, other in found:
                is_same = f"{field}.".startswith(f"{other}.") or f"{other}.".startswith(f"{field}.")
                if is_same and before != source and source in options:
                    raise typer.BadParameter(f"{before} and {source} both set {other}: keep one of them")
            found.append((source, field))


def variants(settings: list[str]) -> list[list[str]]:
    """Return the settings for each GPU and count, of which ``a,b`` names several."""
    found: list[list[str]] = [[]]
    for setting in settings:
        field, _, value = setting.partition("=")
        values = [value]
        if field.strip() in ("hardware.gpu", "hardware.count") and "," in value:
            parts = dict.fromkeys(part.strip(" \"'") for part in value.split(","))
            parted = [json_format.dumps(part) if field.endswith("gpu") else part for part in parts if part]
            values = parted or values
        found = [[*one, f"{field}={part}"] for one in found for part in values]
    return found


def option_of(field: str, words: Iterable[str]) -> str | None:
    """Return the option among the command line's ``words`` that sets the recipe's ``field``, or None."""
    given = {word.partition("=")[0] for word in words}
    for one in RECIPE_OPTIONS:
        keys = [setting.partition("=")[0] for setting in one.settings]
        if any(f"{field}.".startswith(f"{key}.") for key in keys):
            for name in one.names:
                if name in given:
                    return name
    return None


def answer(option: str, known: Iterable[str] = ()) -> str | None:
    """Return how an unknown option is written here, or None: a slip, or a name of another tool.

    Args:
        known: options that there are.
    """
    from trainfit.spec.parsing.synonyms import field_here, near
    from trainfit.spec.recipe import Recipe

    name = option.lstrip("-")
    field = name.replace("-", "_").partition(".")[0]
    if field == "model":
        return "the model is the argument RECIPE, such as trainfit predict llama-3.1-8b"
    here = field_here(name)
    if here is None and field in Recipe.model_fields:
        return f"here it is --set {name.replace('-', '_')}=VALUE"
    if here is None:
        meant = near(option, known)
        return f"did you mean {meant}?" if meant else None
    for one in RECIPE_OPTIONS:
        if [here] == [setting.partition("=")[0] for setting in one.settings]:
            return f"here it is {one.names[0]}"
    return f"here it is --set {here}=VALUE" if FIELD.fullmatch(here) else f"here it is {here}"


def read_recipe(text: str, settings: list[str] | None = None) -> "Recipe":
    """Return the recipe that ``text`` names (``api.recipes.read``); print its notes to standard error."""
    from trainfit.api.recipes import read
    from trainfit.spec.errors import InputError

    try:
        recipe, notes = read(text, settings or [])
    except InputError as error:
        raise _of_another_tool(text) or error from error.__cause__
    print_notes(f"note: {note}" for note in notes)
    return recipe


def _of_another_tool(text: str) -> "InputError | None":
    """Return the refusal of a file that is another tool's configuration; None: it is none."""
    if not Path(text).is_file():
        return None
    from trainfit.integrations.importers.registry import foreign_tool
    from trainfit.spec.errors import InputError

    tool = foreign_tool(text)
    return None if tool is None else InputError(f"this is {tool}", f"write trainfit import {text}", file=text)


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


def attempt(write: Callable[[], None]) -> OSError | None:
    """Write a result's files; return a failure, to be raised once the result is printed."""
    try:
        write()
    except OSError as error:
        return error
    return None


def keep(path: Path | None, kind: Any, recipe: "Recipe", **result: Any) -> None:
    """Append a record of ``result`` (estimate, measurement or train) to ``path``, if one is given."""
    if path is not None:
        from trainfit.records import append
        from trainfit.spec.provenance import new_record

        append(path, new_record(kind, recipe, **result))
