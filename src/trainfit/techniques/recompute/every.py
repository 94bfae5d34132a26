"""Recomputation of every k-th decoder block: blocks 0, k, 2k, ... keep only their input.

Recomputing the last block would free nothing at the peak.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from trainfit.spec.recipe import Recipe
from trainfit.spec.recompute import Every
from trainfit.techniques.base import Draw, Technique
from trainfit.techniques.draft import Draft
from trainfit.techniques.recompute.full import runs_whole

if TYPE_CHECKING:
    from torch import nn


def _label_blocks(recipe: Recipe, model: nn.Module) -> None:
    """Label every block, before a traced model is shortened; refuse a model without repeated blocks."""
    from trainfit.models.layers import require_blocks
    from trainfit.virtual.trace.repeated_layers import BLOCK_CONFIG

    assert isinstance(recipe.recompute, Every)
    every = recipe.recompute.every
    for index, block in enumerate(require_blocks(model, "recompute.every", every, "use recompute: none")):
        setattr(block, BLOCK_CONFIG, "none" if index % every else "full")


def labelled_blocks(
    recipe: Recipe, model: nn.Module, label_blocks: Callable[[Recipe, nn.Module], None]
) -> list[tuple[nn.Module, str]]:
    """Return each decoder block and its label; call ``label_blocks`` unless a trace has labelled them."""
    from trainfit.models.layers import decoder_blocks
    from trainfit.virtual.trace.repeated_layers import BLOCK_CONFIG

    blocks = decoder_blocks(model)
    if not all(hasattr(block, BLOCK_CONFIG) for block in blocks):
        label_blocks(recipe, model)
    return [(block, getattr(block, BLOCK_CONFIG)) for block in blocks]


def checkpoint_labelled(recipe: Recipe, blocks: Iterable[tuple[nn.Module, str]]) -> None:
    """Recompute the blocks whose label begins with ``full``."""
    from trainfit.checkpointing.selective import set_recompute

    for block, label in blocks:
        if label.startswith("full"):
            set_recompute(block, "full", whole=runs_whole(recipe))


def apply(recipe: Recipe, draft: Draft) -> None:
    """Checkpoint every k-th block."""
    checkpoint_labelled(recipe, labelled_blocks(recipe, draft.model, _label_blocks))


def _describe(recipe: Recipe) -> str:
    return f"recompute every {recipe.recompute.every}" if isinstance(recipe.recompute, Every) else ""


TECHNIQUE = Technique(
    name="recompute_every",
    order=80,
    title="Every k-th block",
    covers={"recompute": ("every",)},
    apply=apply,
    describe=_describe,
    examples=({"recompute": {"every": 2}},),
    draw=Draw(alone=lambda chance, _: {"recompute": {"every": chance.choice((2, 2, 3, 4))}}),
    label_blocks=_label_blocks,
)
