"""Recomputation of every k-th decoder block: blocks 0, k, 2k, ... keep only their input.

The other blocks keep everything. Recomputing the last block would free nothing at the peak; that is the
case where the number of blocks is one more than a multiple of k.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainfit.spec.recipe import Recipe
from trainfit.spec.recompute import Every
from trainfit.techniques.base import Draw, Technique
from trainfit.techniques.draft import Draft

if TYPE_CHECKING:
    from torch import nn


def _label_blocks(recipe: Recipe, model: nn.Module) -> None:
    """Label every block, before a traced model is shortened.

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
        _label_blocks(recipe, draft.model)
    for block in blocks:
        if getattr(block, BLOCK_CONFIG) == "full":
            set_recompute(block, "full")


def _describe(recipe: Recipe) -> str:
    return f"recompute every {recipe.recompute.every}" if isinstance(recipe.recompute, Every) else ""


TECHNIQUE = Technique(
    name="recompute_every",
    order=80,
    title="Every k-th block",
    fields=("recompute",),
    covers={"recompute": ("every",)},
    apply=apply,
    describe=_describe,
    examples=({"recompute": {"every": 2}},),
    draw=Draw(alone=lambda chance, _: {"recompute": {"every": chance.choice((2, 2, 3, 4))}}),
    label_blocks=_label_blocks,
)
