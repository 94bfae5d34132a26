"""``trainfit evaluate``: rewards of a policy on held-out tasks, and its games."""

from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from trainfit.cli import options
from trainfit.cli.options import Json, RecipeArgument, Settings, at_most, finite
from trainfit.spec.errors import InputError
from trainfit.spec.printable import say

PROMPTS_HELP = "Held-out tasks, answered once each."
GAMES_HELP = "Games against a random player, of an environment that plays them."
LIMIT_HELP = "Moves after which a game is drawn."
TEMPERATURE_HELP = "Of the sampling; 0 takes the likeliest token. Default: the recipe's."


@options.takes_recipe
def run(
    recipe: RecipeArgument,
    settings: Settings = None,
    prompts: Annotated[int, Option(min=1, callback=at_most, metavar="N", help=PROMPTS_HELP)] = 1000,
    games: Annotated[int, Option(min=0, callback=at_most, metavar="N", help=GAMES_HELP)] = 0,
    limit: Annotated[int, Option(min=1, callback=at_most, metavar="MOVES", help=LIMIT_HELP)] = 400,
    temperature: Annotated[
        float | None, Option(min=0, callback=finite, metavar="T", help=TEMPERATURE_HELP)
    ] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], Option(help="Where to evaluate.")] = "auto",
    json: Json = False,
) -> int:
    """Evaluate a policy: a recipe's weights, or the folder of its run."""
    from trainfit.api.evaluations import evaluate, lines_of
    from trainfit.training.folder import RUN

    wanted = None
    if not (Path(recipe) / RUN).is_file():
        wanted = options.read_recipe(recipe, settings)
    elif settings:
        raise InputError(
            "a run has its own recipe", "leave the recipe's options out", field="RECIPE", value=recipe
        )
    with options.only_json(json):
        found = evaluate(
            recipe, wanted, prompts=prompts, games=games, limit=limit, temperature=temperature, device=device
        )
    if json:
        options.print_json(found)
    else:
        for line in lines_of(found):
            say(line)
    return 0
