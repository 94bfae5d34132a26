"""Adafactor: the second moment as one row and one column a matrix (Shazeer and Stern, arXiv:1804.04235).

Without momentum it is ``torch.optim.Adafactor``; with momentum (the paper's beta1, a whole first moment, fp32 even for
bf16 weights) it is ``transformers.optimization.Adafactor``, because torch's has none. Both scale the learning rate by
the weight's root mean square and clip the update at 1, so momentum is the only large difference between them; their
epsilons differ (the weights' machine epsilon against 1e-30) and so does decay (lr against scaled lr, times the weight).
"""

from __future__ import annotations

from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe
from trainfit.techniques.draft import Draft

COVERS = {"optimizer.name": ("adafactor",)}


def applies(recipe: Recipe) -> bool:
    return recipe.optimizer.name == "adafactor"


def check(recipe: Recipe) -> None:
    """There is no fused Adafactor, and the one with momentum is a plain loop."""
    asked = recipe.optimizer
    field, value = "optimizer.implementation", asked.implementation
    if value == "fused":
        raise InputError(
            "Adafactor has no fused kernel", "use forloop or leave it out", field=field, value=value
        )
    if value == "foreach" and asked.momentum:
        raise InputError(
            "Adafactor with momentum runs as a plain loop",
            "use forloop or leave it out, or set optimizer.momentum: 0",
            field=field,
            value=value,
        )


def apply(recipe: Recipe, draft: Draft) -> None:
    """torch's Adafactor, or with momentum transformers'."""
    asked = recipe.optimizer
    if asked.momentum:
        from transformers.optimization import Adafactor

        draft.make_optimizer = lambda parameters: Adafactor(
            parameters,
            lr=asked.lr,
            weight_decay=asked.weight_decay,
            beta1=asked.momentum,
            relative_step=False,
        )
        return
    import torch

    draft.make_optimizer = lambda parameters: torch.optim.Adafactor(
        parameters, lr=asked.lr, weight_decay=asked.weight_decay, foreach=asked.implementation == "foreach"
    )
