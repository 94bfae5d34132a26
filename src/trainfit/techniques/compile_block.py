"""Compile by block: each repeated decoder block is compiled in place; the rest runs eagerly.

Equal blocks share one compiled graph, so compiling takes about as long as one block does. torchtitan does the same.
"""

from __future__ import annotations

from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe
from trainfit.techniques.draft import Draft

COVERS = {"compile": ("block",)}


def applies(recipe: Recipe) -> bool:
    return recipe.compile == "block"


def check(recipe: Recipe) -> None:
    """Whether a model has blocks shows once it is built."""


def apply(recipe: Recipe, draft: Draft) -> None:
    """Hand every decoder block to the compiler.

    Raises:
        InputError: the model has no list of repeated blocks.
    """
    from trainfit.models.layers import layer_lists

    lists = layer_lists(draft.model)
    if not lists:
        raise InputError(
            "no repeated blocks were found in this model",
            "use compile: model or false",
            field="compile",
            value=recipe.compile,
        )
    for _, blocks in lists:
        for block in blocks:
            draft.compiler(block)
