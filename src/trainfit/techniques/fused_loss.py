"""Fused loss: the next-token loss from hidden states in large chunks of tokens, one kernel between the matrix products.

In as many FLOPs as ``standard`` (kernels/fused_cross_entropy.py says how, and how large a chunk is). A chunk's logits of
bf16 take 2 c v bytes (c tokens, vocabulary v; at most 512 MiB) where ``chunked`` takes 6 c v; the kernel reads them twice and
leaves their gradient in their place. The gradients of the output weight and of the hidden states are there from the
forward on, as with ``chunked``. With ``compile: model`` everything below the output layer is compiled, the loss runs as it is.

Helps where the vocabulary is large beside the model: its elementwise work and its logits are the least of the three losses'.

Costs no quality: the same loss and gradients as ``standard``, in another order of sums.

Refuses models whose way from hidden states to logits is not known here, a head that is no plain linear layer (LoRA on it) or has a
bias, and experts whose own loss balances them (``output_router_logits``).
"""

from __future__ import annotations

from trainfit.spec.recipe import Recipe
from trainfit.techniques.chunked_loss import check_adapter, take_place
from trainfit.techniques.draft import Draft

COVERS = {"loss": ("fused",)}


def applies(recipe: Recipe) -> bool:
    return recipe.loss == "fused"


def check(recipe: Recipe) -> None:
    """Whether a family's output layer is known shows once the model is built."""
    check_adapter(recipe)


def apply(recipe: Recipe, draft: Draft) -> None:
    """Take the place of the model's own loss.

    Raises:
        InputError: the way from hidden states to logits is not known for this model, or has a bias.
    """
    from trainfit.kernels.fused_cross_entropy import fused_linear_cross_entropy, refuse_bias
    from trainfit.models.language_head import language_head

    refuse_bias(language_head(draft.model, "fused").layer.bias)
    take_place(draft, "fused", fused_linear_cross_entropy)
