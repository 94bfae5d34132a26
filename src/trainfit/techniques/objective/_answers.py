"""What the objectives of whole answers share: refusals, and the model that answers are compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainfit.spec.recipe import LossTerms, Recipe
from trainfit.techniques.base import refusal
from trainfit.techniques.loss._hidden_states import refuse_own_forward

if TYPE_CHECKING:
    from trainfit.parallel.reference import Reference

FIELD = "objective.name"
INSTEAD = "use objective: pretrain"


def check_step(recipe: Recipe) -> None:
    """Refuse other losses, and meshes that split a sequence or the model."""
    if recipe.loss not in ("standard", "fused") or recipe.loss_terms != LossTerms():
        problem = "its loss replaces the next-token loss, and never holds all logits"
        raise refusal(recipe, FIELD, problem, "use loss: standard or fused, and leave loss_terms out")
    for dimension in ("tensor", "context", "pipeline", "expert"):
        if getattr(recipe.mesh, dimension) > 1:
            problem = f"its sequences are not divided over parallel.{dimension}"
            raise refusal(recipe, FIELD, problem, "use parallel.shard or parallel.replicate")
    refuse_own_forward(recipe, FIELD, INSTEAD)


def check_reference(recipe: Recipe, reference: str, without: str) -> None:
    """Refuse a reference that the recipe's model cannot be.

    Args:
        without: what to write for no reference.
    """
    if reference == "copy":
        if recipe.offload.weights:
            problem = "a copy of weights that are on the host would be on the GPU"
            raise refusal(recipe, "objective.reference", problem, "use reference: none, or an adapter")
    elif recipe.adapter is None:
        problem = "without an adapter the reference would be the trained model itself"
        remedy = f"set objective.reference: copy or none, {without}or an adapter"
        raise refusal(recipe, FIELD, problem, remedy)
    elif recipe.adapter.modules_to_save:
        problem = "modules that train whole are no part of the adapter that is switched off"
        remedy = "use reference: copy, or leave adapter.modules_to_save out"
        raise refusal(recipe, "objective.reference", problem, remedy)


def reference_of(reference: str) -> Reference:
    """Return the reference of ``objective.reference``: ``copy`` or ``adapter-off``."""
    from trainfit.parallel.reference import AdapterOff, Copy

    return Copy() if reference == "copy" else AdapterOff()
