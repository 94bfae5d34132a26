"""``trainfit explain``: where a recipe's peak occurs, what is alive there, and how another recipe differs.

Torch is imported only if a ledger is not cached.
"""

from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from trainfit.cli import options
from trainfit.cli.options import Json, RecipeArgument, Settings, at_most

if TYPE_CHECKING:
    from trainfit.spec.recipe import Recipe
    from trainfit.spec.result import Explanation


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
    """Show what holds memory at a recipe's peak. Needs no GPU. Options change both recipes."""
    names = [recipe] if other is None else [recipe, other]
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
