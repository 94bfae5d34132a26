"""Recomputation of every k-th decoder block: blocks 0, k, 2k, ... keep only their input and run forward again in backward.

The blocks between keep everything, as without recomputation, so memory and time lie between ``none`` and ``full``. The
last block is a recomputed one only where the number of blocks is one more than a multiple of k: its backward comes next,
and recomputing it would bring back at once what it had freed.

Helps where ``full`` frees more than is needed; a plan by block (``{budget_gib: x}``) usually does better, because it can keep
a part of each.

Costs no quality: gradients are equal bit for bit.

Refuses models without repeated blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainfit.spec.recipe import Recipe
from trainfit.spec.recompute import Every
from trainfit.techniques.base import Draft

if TYPE_CHECKING:
    from torch import nn

NAME = "recompute_every"
COVERS = {"recompute": ("every",)}


def applies(recipe: Recipe) -> bool:
    return isinstance(recipe.recompute, Every)


def check(recipe: Recipe) -> None:
    """It goes with everything but offload, which says so itself."""


def name_blocks(recipe: Recipe, model: nn.Module) -> None:
    """Write on every block what it is to do, before any is cut out of a model that is only traced.

    Raises:
        InputError: the model has no list of repeated blocks.
    """
    if not isinstance(recipe.recompute, Every):
        return
    from trainfit.models.layers import require_blocks
    from trainfit.virtual.trace.repeated_layers import BLOCK_CONFIG

    for index, block in enumerate(
        require_blocks(model, "recompute.every", recipe.recompute.every, "use recompute: none")
    ):
        setattr(block, BLOCK_CONFIG, "full" if index % recipe.recompute.every == 0 else "none")


def apply(recipe: Recipe, draft: Draft) -> None:
    """Checkpoint every k-th block.

    Raises:
        InputError: the model has no list of repeated blocks.
    """
    assert isinstance(recipe.recompute, Every)
    from trainfit.checkpointing.selective import set_recompute
    from trainfit.models.layers import require_blocks
    from trainfit.virtual.trace.repeated_layers import BLOCK_CONFIG

    blocks = require_blocks(draft.model, "recompute.every", recipe.recompute.every, "use recompute: none")
    if not all(hasattr(block, BLOCK_CONFIG) for block in blocks):
        name_blocks(recipe, draft.model)
    for block in blocks:
        if getattr(block, BLOCK_CONFIG) == "full":
            set_recompute(block, "full")
