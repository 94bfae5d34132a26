"""SGD: ``torch.optim.SGD``, with momentum where the recipe gives one (one buffer of each weight's own dtype).

With stochastic rounding it is ours (kernels/sgd.py): bf16 weights and momentum, rounded at random. Left out,
``implementation`` is ``fused``.

Helps where no optimizer state fits at all, and as the floor that other optimizers' memory is compared with.

Costs much quality on transformers, whose layers' gradients differ in size by orders of magnitude: one learning rate fits
few of them. The learning rate has to be found anew.

Refuses nothing.
"""

from __future__ import annotations

from trainfit.spec.recipe import Recipe
from trainfit.techniques.draft import Draft
from trainfit.techniques.stochastic_rounding import seeds

COVERS = {"optimizer.name": ("sgd",)}


def applies(recipe: Recipe) -> bool:
    return recipe.optimizer.name == "sgd"


def check(recipe: Recipe) -> None:
    """SGD takes every implementation and goes with everything."""


def apply(recipe: Recipe, draft: Draft) -> None:
    """One SGD, its implementation said outright: torch's default depends on the device."""
    import torch

    asked = recipe.optimizer
    if asked.stochastic_rounding:
        from trainfit.kernels.sgd import StochasticSGD

        numbers = seeds(recipe)
        draft.make_optimizer = lambda parameters: StochasticSGD(
            parameters, asked.lr, asked.weight_decay, asked.momentum, seed=next(numbers)
        )
        return
    draft.make_optimizer = lambda parameters: torch.optim.SGD(
        parameters,
        lr=asked.lr,
        momentum=asked.momentum,
        weight_decay=asked.weight_decay,
        foreach=asked.implementation == "foreach",
        fused=asked.implementation == "fused",
    )
