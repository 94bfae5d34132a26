"""Selective recomputation: keep a block's matrix products and attention, recompute everything else.

``mm`` is every matrix product over an inner dimension of 512 or more whose result backward needs,
``attention`` every fused attention. ``every: 2`` keeps every second product only, as torchtitan's
``SelectiveAC``.
"""

from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe
from trainfit.spec.recompute import Selective
from trainfit.techniques.base import Draw, Expected, Offer, Technique
from trainfit.techniques.draft import Draft

SAVED = tuple({"selective": {"save": [name]}} for name in ("attention", "mm"))
EVERY_SECOND = {"selective": {"save": ["attention", "mm"], "every": 2}}


def check(recipe: Recipe) -> None:
    """Refuse ``every`` where no matrix product is kept."""
    found = recipe.recompute.selective if isinstance(recipe.recompute, Selective) else None
    if found is not None and found.every > 1 and "mm" not in found.save:
        problem = "it counts kept matrix products, and save keeps none"
        raise InputError(problem, "add mm to save", field="recompute.selective.every", value=found.every)


def apply(recipe: Recipe, draft: Draft) -> None:
    """Checkpoint every block, keeping the listed operations' results; refuse those that cannot be kept."""
    from trainfit.checkpointing.selective import DEFAULT_SAVED, check_names, set_recompute
    from trainfit.models.layers import require_blocks

    found = recipe.recompute.selective if isinstance(recipe.recompute, Selective) else None
    save, every = (found.save, found.every) if found else (DEFAULT_SAVED, 1)
    check_names(save)
    for block in require_blocks(draft.model, "recompute", "selective", "use recompute: none"):
        set_recompute(block, "selective", save=save, every=every, compiled=bool(recipe.compile))


def _describe(recipe: Recipe) -> str:
    if not isinstance(recipe.recompute, Selective):
        return "recompute selective"
    saved, every = recipe.recompute.selective.save, recipe.recompute.selective.every
    return f"recompute selective {'+'.join(saved)}" + f", every {every}. product" * (every > 1)


def _expected(recipe: Recipe) -> Expected:
    """Return the expected effect on a recipe without recomputation; 0.46 to 0.49 of activations remained."""
    return Expected(activations=0.45, time=1.05) if recipe.recompute == "none" else Expected()


TECHNIQUE = Technique(
    name="recompute_selective",
    order=90,
    title="Selective recomputation",
    covers={"recompute": ("selective",)},
    apply=apply,
    describe=_describe,
    check=check,
    variants=({"recompute": SAVED[0]}, {"recompute": EVERY_SECOND}),
    draw=Draw(alone=lambda chance, _: {"recompute": chance.choice(("selective", "selective", *SAVED))}),
    offers=lambda recipe: (Offer({"recompute": "selective"}, _expected(recipe)),),
)
