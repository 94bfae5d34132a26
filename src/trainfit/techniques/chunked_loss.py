"""Chunked and fused loss: the next-token loss from hidden states, a chunk of tokens at a time, without all logits.

In as many FLOPs as ``standard`` (kernels/chunked_cross_entropy.py and kernels/fused_cross_entropy.py say how, and how
large a chunk is). For a model of vocabulary v and hidden size e, n tokens of bf16 hold 10 n v bytes with ``standard`` where
the loss begins its backward; here 6 c v for a chunk of c tokens, and already the gradients of the output weight
(2 e v) and of the hidden states (2 n e). With ``compile: model`` everything below the output layer is compiled, the loss
runs as it is.

``fused`` takes larger chunks and has one kernel between the products: 2 c v bytes, at most 512 MiB, which it reads twice and writes
once.

Helps where the vocabulary is large beside the model, or activations are recomputed: then the logits are the peak.

Costs no quality: the same loss and gradients as ``standard``, in another order of sums.

Refuses models whose way from hidden states to logits is not known here, a head that is no plain linear layer (LoRA on it)
or, with ``fused``, has a bias, and experts whose own loss balances them (``output_router_logits``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe
from trainfit.techniques.draft import Draft

if TYPE_CHECKING:
    import torch
    from torch import nn

COVERS = {"loss": ("chunked", "fused")}
OWN_FORWARD = ("prompt", "prefix", "p-tuning")
"""Adapters whose tokens PEFT's forward adds around the model's."""


def applies(recipe: Recipe) -> bool:
    return recipe.loss in COVERS["loss"]


def check(recipe: Recipe) -> None:
    """Whether a family's output layer is known shows once the model is built."""
    if recipe.adapter is not None and recipe.adapter.kind in OWN_FORWARD:
        raise InputError(
            f"{recipe.adapter.kind} adds its tokens around the model's own forward and loss",
            "use loss: standard, or adapter.kind: lora",
            field="loss",
            value=recipe.loss,
        )


def apply(recipe: Recipe, draft: Draft) -> None:
    """Take the place of the model's own loss.

    Raises:
        InputError: the way from hidden states to logits is not known for this model, or not to this loss.
    """
    import torch.nn.functional as F

    from trainfit.kernels.chunked_cross_entropy import Head, linear_cross_entropy
    from trainfit.kernels.fused_cross_entropy import fused_linear_cross_entropy, refuse_bias
    from trainfit.kernels.gradients_in_forward import IGNORED_LABEL
    from trainfit.models.language_head import language_head

    parts = language_head(draft.model, recipe.loss)
    draft.body = parts.body
    if recipe.loss == "fused":
        refuse_bias(parts.layer.bias)
    function = fused_linear_cross_entropy if recipe.loss == "fused" else linear_cross_entropy

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        hidden_bse = parts.hidden(batch["input_ids"])
        targets_bs = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED_LABEL)
        head = Head(parts.layer.weight, parts.layer.bias, parts.scale, parts.softcap)
        return function(
            hidden_bse.flatten(0, 1), head, targets_bs.flatten(), expected_gradient=_expected_gradient(draft)
        )

    draft.loss = loss


def _expected_gradient(draft: Draft) -> torch.Tensor | float:
    """What the step's backward gives the loss: one over the micro-batches, times the loss scale if there is one."""
    import torch

    share = 1 / draft.num_micro_batches
    if draft.scaler is None or not torch.is_grad_enabled():
        return share
    return draft.scaler.scale(torch.full((), share, device=draft.device))
