"""Selective recomputation: keep a block's matrix products and attention, recompute everything else.

``mm`` is every matrix product over an inner dimension of 512 or more whose result backward needs,
``attention`` every fused attention.
"""

from trainfit.spec.recipe import Recipe
from trainfit.spec.recompute import Selective
from trainfit.techniques.base import Draw, Expected, Offer, Technique
from trainfit.techniques.draft import Draft

SAVED = tuple({"selective": {"save": [name]}} for name in ("attention", "mm"))


def apply(recipe: Recipe, draft: Draft) -> None:
    """Checkpoint every block, keeping the listed operations' results; refuse those that cannot be kept."""
    from trainfit.checkpointing.selective import DEFAULT_SAVED, check_names, set_recompute
    from trainfit.models.layers import require_blocks

    save = recipe.recompute.selective.save if isinstance(recipe.recompute, Selective) else DEFAULT_SAVED
    check_names(save)
    for block in require_blocks(draft.model, "recompute", "selective", "use recompute: none"):
        set_recompute(block, "selective", save=save, compiled=bool(recipe.compile))


def _describe(recipe: Recipe) -> str:
    saved = recipe.recompute.selective.save if isinstance(recipe.recompute, Selective) else ()
    return f"recompute selective {'+'.join(saved)}".strip()


def _expected(recipe: Recipe) -> Expected:
    """Return what is expected of a recipe that recomputed nothing; 0.46 to 0.49 of activations remained."""
    return Expected(activations=0.45, time=1.05) if recipe.recompute == "none" else Expected()


TECHNIQUE = Technique(
    name="recompute_selective",
    order=90,
    title="Selective recomputation",
    covers={"recompute": ("selective",)},
    apply=apply,
    describe=_describe,
    variants=({"recompute": SAVED[0]},),
    draw=Draw(alone=lambda chance, _: {"recompute": chance.choice(("selective", "selective", *SAVED))}),
    offers=lambda recipe: (Offer({"recompute": "selective"}, _expected(recipe)),),
)
