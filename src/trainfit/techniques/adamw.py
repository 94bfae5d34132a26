"""AdamW: ``torch.optim.AdamW`` in its three implementations, two moments of each weight's own dtype.

Source: Loshchilov and Hutter, https://arxiv.org/abs/1711.05101.
"""

from __future__ import annotations

from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe
from trainfit.techniques.draft import Draft

COVERS = {"optimizer.name": ("adamw",)}


def applies(recipe: Recipe) -> bool:
    return recipe.optimizer.name == "adamw"


def check(recipe: Recipe) -> None:
    """AdamW's first moment is always kept, so the recipe's momentum has no meaning here."""
    if recipe.optimizer.momentum:
        raise InputError(
            "AdamW always keeps a first moment (beta 0.9)",
            "remove it, or use optimizer.name: sgd or adafactor",
            field="optimizer.momentum",
            value=recipe.optimizer.momentum,
        )


def apply(recipe: Recipe, draft: Draft) -> None:
    """One AdamW, its implementation said outright: torch's default depends on the device."""
    import torch

    asked = recipe.optimizer
    draft.make_optimizer = lambda parameters: torch.optim.AdamW(
        parameters,
        lr=asked.lr,
        weight_decay=asked.weight_decay,
        foreach=asked.implementation == "foreach",
        fused=asked.implementation == "fused",
    )
