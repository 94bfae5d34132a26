"""Activation offload: the input of each recomputed block waits in pinned host memory.

It is copied out while the next block computes and back while the block after it runs backward. Source:
https://pytorch.org/blog/activation-checkpointing-techniques/
"""

from __future__ import annotations

from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Draw, Technique
from trainfit.techniques.draft import Draft


def check(recipe: Recipe) -> None:
    """Refuse blocks that keep more than their input, and a model compiled whole."""
    if recipe.recompute != "full":
        raise InputError(
            "only the inputs of recomputed blocks are moved",
            "set recompute: full",
            field="offload.activations",
            value=True,
        )
    if recipe.compile == "model":
        raise InputError(
            "a whole compiled model shows no blocks",
            "use compile: block or false",
            field="offload.activations",
            value=True,
        )


def apply(recipe: Recipe, draft: Draft) -> None:
    """Copy every block's input to the host, and back one block ahead.

    Raises:
        InputError: the model has no list of repeated blocks.
    """
    from trainfit.checkpointing.whole_block import BlockRecompute
    from trainfit.models.layers import require_blocks
    from trainfit.offload.copies import CopyStreams

    if recipe.offload.weights:
        return  # offload_weights.py has the same runs move both.
    blocks = require_blocks(draft.model, "offload.activations", True, "set offload.activations: false")
    BlockRecompute(blocks, CopyStreams(draft.device), offload=True).install()


TECHNIQUE = Technique(
    name="offload_activations",
    order=180,
    title="Activation offload",
    fields=("offload.activations",),
    covers={"offload.activations": (True,)},
    check=check,
    apply=apply,
    describe=lambda recipe: "activations on the host",
    examples=({"offload": {"activations": True}},),
    needs={"recompute": "full"},
    draw=Draw(alone=lambda chance, _: {"recompute": "full", "offload": {"activations": True}}),
    trace_whole=lambda recipe: bool(recipe.compile),
)
