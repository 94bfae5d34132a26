"""Loader: DataLoader workers, prefetching and pinned memory (measurement/feed.py).

The next step's data are copied to the device after this step's last kernel, so the peak stays the same.
"""

import random

from trainfit.spec.recipe import Loader, Recipe
from trainfit.techniques.base import Data, Draw, Technique, refusal


def check(recipe: Recipe) -> None:
    """Refuse ``prefetch`` without workers."""
    if recipe.loader.workers == 0 and recipe.loader.prefetch != Loader().prefetch:
        remedy = "set loader.workers to 1 or more, or leave loader.prefetch out"
        raise refusal(recipe, "loader.prefetch", "prefetching needs a worker", remedy)


def _describe(recipe: Recipe) -> str:
    return f"{recipe.loader.workers} loader workers" if recipe.loader.workers else ""


def _draw(chance: random.Random, _: Data) -> Data:
    # (0, True) is the default.
    workers, pinned = chance.choice(((0, False), (1, True), (2, True), (2, False)))
    return {"loader": {"workers": workers, "pin_memory": pinned}}


TECHNIQUE = Technique(
    name="loader",
    order=220,
    title="Loader",
    fields=("loader",),
    check=check,
    when=lambda recipe: recipe.loader != Loader(),
    describe=_describe,
    variants=({"loader": {"prefetch": 4}},),
    examples=({"loader": {"workers": 2}},),
    draw=Draw(alone=_draw),
)
