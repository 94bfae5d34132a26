"""Compile the whole model: one graph from token ids to loss, where nothing in the model breaks it.

All gradients come at once, when the one backward of the graph returns, so the optimizer in the backward frees none of
them early.

Helps speed a little more than ``block``, since embedding, head and loss are fused too; it is what ``recompute: {budget: x}``
works best with, because the budget is then the whole model's.

Costs no quality but the rounding of fused operations. Compiling takes as long as the model has blocks.

Refuses nothing more once the model is built.
"""

from __future__ import annotations

from trainfit.spec.recipe import Recipe
from trainfit.techniques.draft import Draft

COVERS = {"compile": ("model",)}


def applies(recipe: Recipe) -> bool:
    return recipe.compile == "model"


def check(recipe: Recipe) -> None:
    """Compile goes with everything that is there."""


def apply(recipe: Recipe, draft: Draft) -> None:
    """Hand the model to the compiler, or what a loss of its own calls of it."""
    draft.compiler(draft.model if draft.body is None else draft.body)
