"""``trainfit explain``: where a recipe's peak occurs, what is alive there, and how another recipe differs.

A memory snapshot of PyTorch, and the message of an OutOfMemoryError, are explained likewise. Two files of
ledgers are compared by their entries.

Torch is imported only if a ledger is not cached.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from trainfit.cli import options
from trainfit.cli.options import Json, RecipeArgument, Settings, at_most
from trainfit.spec.errors import InputError

if TYPE_CHECKING:
    from trainfit.spec.recipe import Recipe
    from trainfit.spec.result import Explanation

LEDGER_SUFFIX = ".json.gz"
SNAPSHOT_SUFFIXES = (".pickle", ".pkl")
TEXT_SUFFIXES = (".txt", ".log")
STANDARD_INPUT = "-"
ONE_KIND = "name two ledgers, which predict --verbose prints, or two recipes"


@options.takes_recipe
def run(
    recipe: RecipeArgument,
    other: Annotated[
        str | None, Argument(metavar="[OTHER]", help="A second recipe or snapshot to compare with.")
    ] = None,
    settings: Settings = None,
    top: Annotated[
        int, Option(min=1, callback=at_most, metavar="N", help="Number of holders, the largest first.")
    ] = 15,
    device: Annotated[
        int | None, Option(min=0, metavar="N", help="GPU of a snapshot. Default: the one with most events.")
    ] = None,
    json: Json = False,
) -> None:
    """Show what holds memory at the peak of a recipe or of a memory snapshot (.pickle). Needs no GPU.

    A second recipe or snapshot is compared with it; options change both recipes. Text with the message of an
    OutOfMemoryError (.txt, .log, - for standard input) is read too. Two ledgers (files of the cache,
    .json.gz) are compared by their operations and allocations.
    """
    names = [recipe] if other is None else [recipe, other]
    if is_message(recipe):
        _explain_message(recipe, other, settings, json=json)
        return
    if any(name.endswith(LEDGER_SUFFIX) for name in names):
        _compare_ledgers(names, settings, top, json=json)
        return
    snapshots = [name for name in names if is_snapshot(name)]
    if settings and len(snapshots) == len(names):
        raise InputError("a snapshot has no fields to set", "leave it out", field="--set", value=settings[0])
    if device is not None and not snapshots:
        raise InputError("only a snapshot has several GPUs", "leave it out", field="--device", value=device)
    recipes = {name: options.read_recipe(name, settings) for name in names if not is_snapshot(name)}
    found: list[tuple[Recipe | None, Explanation]] = []
    for name in names:
        if name in recipes:
            found.append(_explained(name, recipes[name], settings, json=json))
        else:
            found.append((None, _explain_snapshot(Path(name), device)))
    explanations = [explanation for _, explanation in found]
    if json:
        both = {"explanations": [one.model_dump(mode="json") for one in explanations]}
        options.print_json(explanations[0] if other is None else both)
        return
    from trainfit.cli.text.explain import show, show_difference, show_snapshot

    for built, explanation in found:
        if built is None:
            show_snapshot(explanation, top)
        else:
            show(built, explanation, top)
    if other is not None:
        show_difference(explanations[0], explanations[1], top)


def is_snapshot(name: str) -> bool:
    """Return whether an argument names a memory snapshot."""
    return name.endswith(SNAPSHOT_SUFFIXES)


def is_message(name: str) -> bool:
    """Return whether an argument names text with an error message."""
    return name == STANDARD_INPUT or name.endswith(TEXT_SUFFIXES)


def _explained(
    name: str, one: "Recipe", settings: list[str] | None, *, json: bool
) -> tuple["Recipe", "Explanation"]:
    from trainfit.api.planned import planned
    from trainfit.report.console import progress

    with (
        options.work(name, settings, json=json, record=None),
        progress(f"explaining {one.model.display_name}: one step on the virtual GPU"),
    ):
        from trainfit.explanation.peak import explain

        built, notes = planned(one)
        options.print_notes(notes)
        return built, explain(built)


def _explain_snapshot(path: Path, device: int | None) -> "Explanation":
    from trainfit.explanation.snapshot.explain import explain_snapshot
    from trainfit.report.console import progress
    from trainfit.spec.units import MIB

    if not path.is_file():
        raise InputError("there is no such file", "name a memory snapshot of PyTorch", value=str(path))
    with progress(f"reading {path.name}") as replace:

        def advance(at: int, of: int) -> None:
            replace(
                f"reading {path.name}: {at / MIB:,.0f} of {of / MIB:,.0f} MiB"
                if at < of
                else f"replaying {path.name}"
            )

        return explain_snapshot(path, device, advance)


def _explain_message(name: str, other: str | None, settings: list[str] | None, *, json: bool) -> None:
    """Print what the message of an OutOfMemoryError says."""
    if other is not None or settings:
        raise InputError("a message is explained alone", "leave the rest out", value=other or str(settings))
    from trainfit.cli.text.explain import show_message
    from trainfit.explanation.oom_text import LONGEST, read_message

    text = last_of(None if name == STANDARD_INPUT else Path(name), LONGEST)
    found = read_message(text, file="" if name == STANDARD_INPUT else name)
    if json:
        options.print_json(found)
    else:
        show_message(found)


def last_of(path: Path | None, num_bytes: int) -> str:
    """Return the end of a text file, or of standard input.

    Raises:
        InputError: it cannot be read.
    """
    if path is None:
        kept = b""
        while part := sys.stdin.buffer.read(num_bytes):
            kept = (kept + part)[-num_bytes:]
        return kept.decode("utf-8", "replace")
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - num_bytes))
            return file.read().decode("utf-8", "replace")
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", "name a text file", file=str(path)) from None


def _compare_ledgers(names: list[str], settings: list[str] | None, top: int, *, json: bool) -> None:
    """Print how the second of two files of ledgers differs from the first."""
    if len(names) != 2 or not all(name.endswith(LEDGER_SUFFIX) for name in names):
        raise InputError("a ledger is compared with another ledger", ONE_KIND, value=" ".join(names))
    if settings:
        raise InputError("a ledger has no fields to set", "leave it out", field="--set", value=settings[0])
    from trainfit.explanation.ledgers import compare
    from trainfit.ledger.file import load

    ledgers = []
    for name in names:
        if not Path(name).is_file():
            raise InputError("there is no such file", ONE_KIND, value=name)
        try:
            ledgers.append(load(Path(name)))
        except ValueError as error:
            raise InputError(str(error), ONE_KIND) from None
    found = compare(*ledgers)
    if json:
        tables = {key: [one._asdict() for one in table] for key, table in found._asdict().items()}
        options.print_json(tables)
        return
    from trainfit.cli.text.explain import show_ledgers

    show_ledgers(found, top)
