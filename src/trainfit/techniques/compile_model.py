"""Compile the whole model: one graph from token ids to loss, where nothing in the model breaks it."""

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
