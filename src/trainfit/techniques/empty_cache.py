"""Emptying the cache: every n steps the caching allocator returns its unused segments to the driver.

On the virtual GPU the replay of the ledger empties the cache at the same steps (ledger/replay.py). Source:
https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.empty_cache.html
"""

from collections.abc import Callable

from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Draw, Technique
from trainfit.techniques.draft import Draft


def apply(recipe: Recipe, draft: Draft) -> None:
    """Empty the cache of a CUDA device after every n-th step."""
    assert recipe.empty_cache_every is not None
    if draft.device.type == "cuda":
        import torch

        draft.after_step.append(every(recipe.empty_cache_every, torch.cuda.empty_cache))


def every(count: int, call: Callable[[], None]) -> Callable[[], None]:
    """Return a function that runs ``call`` every ``count``-th time it is called."""
    calls = 0

    def counted() -> None:
        nonlocal calls
        calls += 1
        if calls % count == 0:
            call()

    return counted


TECHNIQUE = Technique(
    name="empty_cache",
    order=230,
    title="Emptying the cache",
    fields=("empty_cache_every",),
    apply=apply,
    when=lambda recipe: recipe.empty_cache_every is not None,
    describe=lambda recipe: f"cache emptied every {recipe.empty_cache_every} steps",
    examples=({"empty_cache_every": 1},),
    draw=Draw(alone=lambda chance, _: {"empty_cache_every": chance.choice((1, 1, 2, 3))}),
)
