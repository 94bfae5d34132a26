"""Emptying the cache: after every n steps the allocator gives its unused memory back to the driver.

Reserved bytes fall to what is in use and grow again in the next step, out of new segments cut for it; allocated bytes
change by what blocks are larger than asked, a few MiB. On the virtual GPU nothing is called: the replay of the ledger gives
the cache back at the same places (ledger/replay.py). A CPU has no such cache.
Source: https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.empty_cache.html

Helps where memory is cut up differently from step to step, or where another process needs room between steps. It does not
lower the peak; the driver's calls cost time in the step that follows.

Costs no quality.

Refuses nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Draw, Technique
from trainfit.techniques.draft import Draft


def apply(recipe: Recipe, draft: Draft) -> None:
    """Count steps; after every n-th one empty the cache of a CUDA device."""
    assert recipe.empty_cache_every is not None
    if draft.device.type == "cuda":
        import torch

        draft.after_step.append(every(recipe.empty_cache_every, torch.cuda.empty_cache))


def every(count: int, call: Callable[[], None]) -> Callable[[], None]:
    """A function that does ``call`` each ``count``-th time it is called."""
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
