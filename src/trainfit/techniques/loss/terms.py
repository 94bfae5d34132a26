"""Loss terms: label smoothing and z-loss, in addition to the next-token cross-entropy.

A token's loss is (1 - s)(lse - x_t) + s mean_j(lse - x_j) + z lse^2, for its logits x, their log-sum-exp
lse and the target t: label smoothing s (Szegedy et al., arXiv:1512.00567, section 7), z-loss z (Chowdhery
et al., PaLM, arXiv:2204.02311, section 5), averaged over the tokens that are not ignored. Logits are scaled
and soft-capped as in the loss. ``loss: standard`` computes it from all logits in fp32, ``loss: fused`` in
its kernel. Training reports this loss, evaluation the cross-entropy.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from trainfit.spec.recipe import LossTerms, Recipe
from trainfit.techniques.base import Data, Draw, Technique, refusal
from trainfit.techniques.draft import Draft
from trainfit.techniques.loss._hidden_states import refuse_own_forward

if TYPE_CHECKING:
    import torch
    from torch import nn


BOTH = {"label_smoothing": 0.1, "z_loss": 1e-4}


def check(recipe: Recipe) -> None:
    """Refuse the chunked loss and adapters that change the model's own forward."""
    if recipe.loss == "chunked":
        raise refusal(
            recipe, "loss_terms", "loss: chunked does not support loss terms", "use loss: fused or standard"
        )
    refuse_own_forward(recipe, "loss_terms", "leave loss_terms out")


def apply(recipe: Recipe, draft: Draft) -> None:
    """Replace the model's own loss, unless it has terms of its own; ``loss: fused`` adds them itself."""
    if recipe.loss != "standard":
        return
    import torch.nn.functional as F

    from trainfit.kernels.cross_entropy.gradients_in_forward import IGNORED_LABEL
    from trainfit.kernels.cross_entropy.terms import Terms, cross_entropy_with_terms
    from trainfit.models.language_head import Setting, refuse_router_loss
    from trainfit.models.packed import model_inputs

    values = recipe.loss_terms.model_dump()
    refuse_router_loss(draft.model, Setting("loss_terms", values, "leave loss_terms out"))
    terms = Terms(recipe.loss_terms.label_smoothing, recipe.loss_terms.z_loss)

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits: Any = model(**model_inputs(batch)).logits
        targets_bs = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED_LABEL)
        return cross_entropy_with_terms(logits.flatten(0, 1), targets_bs.flatten(), terms)

    def cross_entropy(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(**model_inputs(batch), labels=batch["labels"]).loss

    draft.loss, draft.cross_entropy = loss, cross_entropy


def _describe(recipe: Recipe) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in recipe.loss_terms.model_dump().items() if value)


def _draw(chance: random.Random, _: Data) -> Data:
    terms = chance.choice(({"label_smoothing": 0.1}, {"z_loss": 1e-4}, BOTH))
    return {"loss": chance.choice(("standard", "fused")), "loss_terms": terms}


TECHNIQUE = Technique(
    name="loss_terms",
    order=140,
    title="Loss terms",
    fields=("loss_terms",),
    check=check,
    apply=apply,
    when=lambda recipe: recipe.loss_terms != LossTerms(),
    describe=_describe,
    examples=({"loss_terms": BOTH},),
    draw=Draw(alone=_draw),
)
