"""Losses that begin at the hidden states and never hold all logits.

Shapes: b micro-batch, s sequence, e hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe
from trainfit.techniques.draft import Draft, LossFunction

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from trainfit.kernels.cross_entropy.chunked import Head
    from trainfit.models.language_head import LanguageHead

OWN_FORWARD = ("prompt", "prefix", "p-tuning")
"""Adapters whose tokens PEFT's forward adds around the model's."""


def refuse_own_forward(recipe: Recipe) -> None:
    """Refuse adapters that change the model's own forward.

    Raises:
        InputError: an adapter with tokens of its own.
    """
    if recipe.adapter is not None and recipe.adapter.kind in OWN_FORWARD:
        raise InputError(
            f"{recipe.adapter.kind} adds its tokens around the model's own forward and loss",
            "use loss: standard, or adapter.kind: lora",
            field="loss",
            value=recipe.loss,
        )


def loss_of(
    draft: Draft, parts: LanguageHead, function: Callable[[Tensor, Head, Tensor, Tensor | float], Tensor]
) -> LossFunction:
    """Return a step's loss by ``function(hidden [bs, e], head, targets [bs], expected gradient)``."""
    import torch.nn.functional as F

    from trainfit.kernels.cross_entropy.chunked import Head
    from trainfit.kernels.cross_entropy.gradients_in_forward import IGNORED_LABEL

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        hidden_bse = parts.hidden(batch["input_ids"])
        targets_bs = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED_LABEL)
        head = Head(parts.layer.weight, parts.layer.bias, parts.scale, parts.softcap)
        return function(hidden_bse.flatten(0, 1), head, targets_bs.flatten(), _expected_gradient(draft))

    return loss


def _expected_gradient(draft: Draft) -> Tensor | float:
    """Return the loss's gradient in the backward: 1 / micro-batches, times the loss scale if any."""
    import torch

    share = 1 / draft.num_micro_batches
    if draft.scaler is None or not torch.is_grad_enabled():
        return share
    return draft.scaler.scale(torch.full((), share, device=draft.device))
