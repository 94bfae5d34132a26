"""Activations on the host: what the blocks keep for their backward waits in pinned host memory.

With full recomputation that is each block's input: one [batch, seq, hidden] tensor a block, which on a deep model is the
largest part of what recomputation leaves. It is copied out while the next block computes and back while the block
after it runs backward. The idea: https://pytorch.org/blog/activation-checkpointing-techniques/ and Unsloth's offloaded
checkpointing.

Helps deep models and long sequences under full recomputation. It costs no time where a block computes longer than its
input needs over PCIe.

Costs no quality: it changes no result.

Refuses models without repeated blocks, and blocks that hand on more than hidden states that need a gradient.
"""

from __future__ import annotations

from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Draft

NAME = "offload_activations"
COVERS = {"offload.activations": (True,)}


def applies(recipe: Recipe) -> bool:
    return recipe.offload.activations


def check(recipe: Recipe) -> None:
    """Blocks are followed one by one, each keeping its input."""
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
    """Every block's input goes to the host and comes back one block ahead.

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
