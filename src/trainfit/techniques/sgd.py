"""SGD: ``torch.optim.SGD``, with momentum where the recipe gives one (one buffer of each weight's own dtype)."""

from __future__ import annotations

from trainfit.spec.recipe import Recipe
from trainfit.techniques.draft import Draft

COVERS = {"optimizer.name": ("sgd",)}


def applies(recipe: Recipe) -> bool:
    return recipe.optimizer.name == "sgd"


def check(recipe: Recipe) -> None:
    """SGD takes every implementation and goes with everything."""


def apply(recipe: Recipe, draft: Draft) -> None:
    """One SGD, its implementation said outright: torch's default depends on the device."""
    import torch

    asked = recipe.optimizer
    draft.make_optimizer = lambda parameters: torch.optim.SGD(
        parameters,
        lr=asked.lr,
        momentum=asked.momentum,
        weight_decay=asked.weight_decay,
        foreach=asked.implementation == "foreach",
        fused=asked.implementation == "fused",
    )
