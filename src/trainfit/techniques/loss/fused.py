"""Fused loss: the next-token loss from hidden states in large chunks, one kernel between the matrix products.

For each chunk of c tokens, products make the logits, one kernel overwrites them with their gradient, and
two products make the gradients of hidden states and output weight (kernels/cross_entropy/fused.py). Nothing
is computed twice. It holds 2 c v bytes of logits for vocabulary v, at most 512 MiB. Soft-capped and scaled
logits, label smoothing and z-loss are supported. With ``compile: model`` everything below the output layer
is compiled.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from trainfit.catalog.families import FAMILIES
from trainfit.spec.recipe import Recipe
from trainfit.techniques._triton_gpus import refuse_old_gpu
from trainfit.techniques.base import Data, Draw, Technique
from trainfit.techniques.draft import Draft, LossFunction
from trainfit.techniques.loss._hidden_states import loss_of, refuse_own_forward

if TYPE_CHECKING:
    from torch import Tensor

    from trainfit.kernels.cross_entropy.chunked import Head
    from trainfit.kernels.cross_entropy.terms import Terms


def check(recipe: Recipe) -> None:
    """Refuse adapters that change the model's own forward, and GPUs too old for Triton."""
    refuse_own_forward(recipe)
    refuse_old_gpu(recipe, "loss", "fused", "loss: standard")


def check_device(recipe: Recipe, device_type: str) -> None:
    """Refuse a GPU without Triton."""
    from trainfit.kernels.custom_op import require_triton

    require_triton(device_type, "loss", "fused", "loss: standard")


def apply(recipe: Recipe, draft: Draft) -> None:
    """Replace the model's own loss, with the recipe's terms; evaluation is without them.

    Raises:
        InputError: a model whose output layer is not known, or whose head has a bias.
    """
    from trainfit.kernels.cross_entropy.fused import fused_linear_cross_entropy, refuse_bias
    from trainfit.kernels.cross_entropy.terms import Terms
    from trainfit.models.language_head import language_head

    def with_terms(terms: Terms) -> LossFunction:
        def function(hidden: Tensor, head: Head, targets: Tensor, expected: Tensor | float) -> Tensor:
            return fused_linear_cross_entropy(hidden, head, targets, terms, expected_gradient=expected)

        return loss_of(draft, parts, function)

    parts = language_head(draft.model, recipe.loss)
    refuse_bias(parts.layer.bias)
    draft.body = parts.body
    options = recipe.loss_terms
    draft.loss = with_terms(Terms(options.label_smoothing, options.z_loss))
    draft.cross_entropy = with_terms(Terms())


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
    fields=("loss",),
    covers={"loss": ("fused",)},
    check=check,
    check_device=check_device,
    apply=apply,
    describe=lambda recipe: "fused loss",
    examples=({"loss": "fused"},),
    draw=Draw(alone=_draw),
)
