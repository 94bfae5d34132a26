"""Losses that begin at the hidden states and never hold all logits.

Shapes: b micro-batch, s sequence, e hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Expected, refusal
from trainfit.techniques.draft import Draft, LossFunction

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from trainfit.models.language_head import LanguageHead


def refuse_own_forward(recipe: Recipe, field: str = "loss", instead: str = "use loss: standard") -> None:
    """Refuse adapters whose tokens PEFT's forward adds around the model's."""
    if recipe.adapter is not None and recipe.adapter.kind in ("prompt", "prefix", "p-tuning"):
        problem = f"{recipe.adapter.kind} adds its tokens around the model's own forward and loss"
        raise refusal(recipe, field, problem, f"{instead}, or adapter.kind: lora")


def without_logits(recipe: Recipe) -> Expected:
    """Return the expected effect of a loss that never holds all logits."""
    return Expected(logits=0.3) if recipe.loss == "standard" else Expected()


def loss_of(draft: Draft, parts: LanguageHead, function: Callable[..., Tensor]) -> LossFunction:
    """Return a step's loss by ``function(hidden [bs, e], head, targets [bs], expected_gradient=)``."""
    import torch.nn.functional as F

    from trainfit.kernels.cross_entropy.chunked import Head
    from trainfit.kernels.cross_entropy.gradients_in_forward import IGNORED_LABEL
    from trainfit.models.packed import model_inputs

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        ids_bs, shards = batch["input_ids"], draft.sequences
        targets_bs = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED_LABEL)
        expected = expected_gradient(draft)
        if shards is None:
            return mean(parts.hidden(**model_inputs(batch)), targets_bs, expected)
        hidden_bse = parts.hidden(shards.own(ids_bs), position_ids=shards.positions(ids_bs))
        return shards.mean_loss(partial(mean, hidden_bse), targets_bs, expected)

    def mean(hidden_bse: Tensor, targets_bs: Tensor, expected: Tensor | float) -> Tensor:
        kept = getattr(parts.layer, "kept", None)  # models/kept_gradients.py
        head = Head(parts.layer.weight, parts.layer.bias, parts.scale, parts.softcap, kept)
        return function(hidden_bse.flatten(0, 1), head, targets_bs.flatten(), expected_gradient=expected)

    return loss


def expected_gradient(draft: Draft) -> Tensor | float:
    """Return the loss's gradient in the backward: 1 / micro-batches, times the loss scale if any."""
    import torch

    share = 1 / draft.num_micro_batches
    if draft.scaler is None or not torch.is_grad_enabled():
        return share
    return draft.scaler.scale(torch.full((), share, device=draft.device))
