"""``trainfit explain``: where a recipe's peak occurs, what is alive there, and how another recipe differs.

Two files of ledgers are compared by their entries.

Torch is imported only if a ledger is not cached.
"""

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
ONE_KIND = "name two ledgers, which predict --verbose prints, or two recipes"


@options.takes_recipe
def run(
    recipe: RecipeArgument,
    other: Annotated[str | None, Argument(metavar="[OTHER]", help="A second recipe to compare with.")] = None,
    settings: Settings = None,
    top: Annotated[
        int, Option(min=1, callback=at_most, metavar="N", help="Number of holders, the largest first.")
    ] = 15,
    json: Json = False,
) -> None:
    """Show what holds memory at a recipe's peak. Needs no GPU. Options change both recipes.

    Two ledgers (files of the cache, .json.gz) are compared by their operations and allocations.
    """
    names = [recipe] if other is None else [recipe, other]
    if any(name.endswith(LEDGER_SUFFIX) for name in names):
        _compare_ledgers(names, settings, top, json=json)
        return
    requested = [options.read_recipe(name, settings) for name in names]
    from trainfit.api.planned import planned
    from trainfit.report.console import progress

    found: list[tuple[Recipe, Explanation]] = []
    for name, one in zip(names, requested, strict=True):
        with (
            options.work(name, settings, json=json, record=None),
            progress(f"explaining {one.model.display_name}: one step on the virtual GPU"),
        ):
            from trainfit.explanation.peak import explain

            built, notes = planned(one)
            options.print_notes(notes)
            found.append((built, explain(built)))
    explanations = [explanation for _, explanation in found]
    if json:
        both = {"explanations": [one.model_dump(mode="json") for one in explanations]}
        options.print_json(explanations[0] if other is None else both)
        return
    from trainfit.cli.text.explain import show, show_difference

    for built, explanation in found:
        show(built, explanation, top)
    if other is not None:
        show_difference(explanations[0], explanations[1], top)


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
