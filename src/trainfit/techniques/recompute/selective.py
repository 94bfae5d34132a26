"""Selective recomputation: keep a block's matrix products and attention, recompute everything else.

Uses autograd's own bookkeeping; kept results are not computed twice. ``mm`` is every matrix product over an
inner dimension of 512 or more whose result backward needs, ``attention`` every fused attention.
``{selective: {save: [...]}}`` lists others, also PyTorch's operations by name.
"""

from __future__ import annotations

from trainfit.spec.recipe import Recipe
from trainfit.spec.recompute import Selective
from trainfit.techniques.base import Draw, Technique
from trainfit.techniques.draft import Draft


def apply(recipe: Recipe, draft: Draft) -> None:
    """Checkpoint every block, keeping the results of the listed operations.

    Raises:
        InputError: an operation that cannot be kept, or a model without repeated blocks.
    """
    from trainfit.checkpointing.selective import DEFAULT_SAVED, check_names, set_recompute
    from trainfit.models.layers import require_blocks

    save = recipe.recompute.selective.save if isinstance(recipe.recompute, Selective) else DEFAULT_SAVED
    check_names(save)
    for block in require_blocks(draft.model, "recompute", "selective", "use recompute: none"):
        set_recompute(block, "selective", save=save, compiled=bool(recipe.compile))


DRAWN = (
    "selective",
    "selective",
    {"selective": {"save": ["attention"]}},
    {"selective": {"save": ["mm"]}},
)


def _describe(recipe: Recipe) -> str:
    saved = recipe.recompute.selective.save if isinstance(recipe.recompute, Selective) else ()
    return f"recompute selective {'+'.join(saved)}".strip()


TECHNIQUE = Technique(
    name="recompute_selective",
    order=90,
    title="Selective recomputation",
    fields=("recompute",),
    covers={"recompute": ("selective",)},
    apply=apply,
    describe=_describe,
    variants=({"recompute": {"selective": {"save": ["attention"]}}},),
    examples=({"recompute": "selective"},),
    draw=Draw(alone=lambda chance, _: {"recompute": chance.choice(DRAWN)}),
)
