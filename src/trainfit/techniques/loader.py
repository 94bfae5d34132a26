"""The loader: how batches reach the device, by how many processes, how far ahead and from which memory.

``workers`` processes (torch's DataLoader) read ahead, ``prefetch`` steps each; 0 reads in the training process itself.
From pinned memory a copy to a GPU does not hold up the host; from pageable memory the host waits until the GPU has come
to it. Which sequences a step gets depends on the step's number alone, so they are the same with any number of workers
and after a resume.

On the device there is one step's data while the step runs: the next step's is copied when all of this step has been
issued, behind its last kernel. So the loader changes no byte of the peak, and ``predict`` knows none. ``measure``
computes on one batch that stays on the device, as long as the loader has its defaults; where it has not, it is fed
random tokens through the loader, as ``train`` is with text.

Helps where reading and cutting text takes the host longer than a step takes the GPU.

Costs no quality: the same sequences in the same order.

Refuses nothing.
"""

from __future__ import annotations

import random

from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Loader, Recipe
from trainfit.techniques.base import Data, Draw, Technique


def check(recipe: Recipe) -> None:
    """Only workers prepare anything ahead."""
    asked = recipe.loader
    if asked.workers == 0 and asked.prefetch != Loader().prefetch:
        raise InputError(
            "no worker is there to prepare batches ahead",
            "set loader.workers to 1 or more, or leave loader.prefetch out",
            field="loader.prefetch",
            value=asked.prefetch,
        )


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
