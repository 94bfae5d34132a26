"""Fused loss: the next-token loss from hidden states in large chunks, one kernel between the matrix products.

Method: kernels/cross_entropy/fused.py. Nothing is computed twice. With ``compile: model`` everything below
the output layer is compiled.
"""

import random
from functools import partial

from trainfit.catalog.families import FAMILIES
from trainfit.spec.recipe import Recipe
from trainfit.techniques._triton_gpus import check_device
from trainfit.techniques.base import Data, Draw, Offer, Technique
from trainfit.techniques.draft import Draft
from trainfit.techniques.loss._hidden_states import loss_of, refuse_own_forward, without_logits


def apply(recipe: Recipe, draft: Draft) -> None:
    """Replace the model's own loss, with the recipe's loss terms; evaluation leaves them out."""
    from trainfit.kernels.cross_entropy.fused import fused_linear_cross_entropy, refuse_bias
    from trainfit.kernels.cross_entropy.terms import Terms
    from trainfit.models.language_head import Setting, language_head

    parts = language_head(draft.model, Setting("loss", recipe.loss, "use loss: standard"))
    refuse_bias(parts.layer.bias)
    draft.body = parts.body
    terms = Terms(recipe.loss_terms.label_smoothing, recipe.loss_terms.z_loss)
    draft.loss = loss_of(draft, parts, partial(fused_linear_cross_entropy, terms=terms))
    draft.cross_entropy = loss_of(draft, parts, partial(fused_linear_cross_entropy, terms=Terms()))


def _draw(chance: random.Random, recipe: Data) -> Data:
    """Draw Gemma 2 more often than its share: its logits are soft-capped."""
    drawn: Data = {"loss": "fused"}
    if recipe["model"]["implementation"] == "hf" and chance.random() < 0.3:
        drawn["model"] = {"config": chance.choice(FAMILIES["gemma2"])}
    return drawn


TECHNIQUE = Technique(
    name="fused_loss",
    order=130,
    title="Fused loss",
    covers={"loss": ("fused",)},
    triton={"loss": ("fused",)},
    check_device=partial(check_device, field="loss"),
    check=refuse_own_forward,
    apply=apply,
    describe=lambda recipe: "fused loss",
    draw=Draw(alone=_draw),
    offers=lambda recipe: (Offer({"loss": "fused"}, without_logits(recipe), is_start=True),),
)
