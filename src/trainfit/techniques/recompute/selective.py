"""Recomputation by operation: a block's matrix products and attention are kept, everything else is computed again.

What is cheap to compute and large to keep (norms, activation functions, rotations, casts, dropout) runs again in backward,
with autograd's own bookkeeping; what a block's list keeps is not computed twice. ``mm`` is every matrix product over an
inner dimension of 512 or more that somebody asks for, ``attention`` every fused attention; ``{selective: {save: [...]}}``
lists others, such as ``[attention]`` alone, or PyTorch's operations by name.

Helps where ``none`` does not fit by little, since it costs little time on the GPU; without compiling, each operation of a
block also passes through Python twice, which small models feel.

Costs no quality: gradients are equal bit for bit, dropout too.

Refuses operations that PyTorch does not have or that give their input's own memory, and models without repeated blocks.
"""

from __future__ import annotations

from trainfit.spec.recipe import Recipe
from trainfit.spec.recompute import Selective
from trainfit.techniques.base import Draft

NAME = "recompute_selective"
COVERS = {"recompute": ("selective",)}


def applies(recipe: Recipe) -> bool:
    return recipe.recompute == "selective" or isinstance(recipe.recompute, Selective)


def check(recipe: Recipe) -> None:
    """Which operations there are only PyTorch can tell."""


def apply(recipe: Recipe, draft: Draft) -> None:
    """Checkpoint every block, keeping what the listed operations give.

    Raises:
        InputError: an operation that cannot be kept, or a model without repeated blocks.
    """
    from trainfit.checkpointing.selective import DEFAULT_SAVED, check_names, set_recompute
    from trainfit.models.layers import require_blocks

    save = recipe.recompute.selective.save if isinstance(recipe.recompute, Selective) else DEFAULT_SAVED
    check_names(save)
    for block in require_blocks(draft.model, "recompute", "selective", "use recompute: none"):
        set_recompute(block, "selective", save=save, compiled=bool(recipe.compile))
