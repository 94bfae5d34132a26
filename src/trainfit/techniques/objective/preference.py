"""DPO: losses of pairs of answers, from their log-probabilities by the model and by a reference.

A micro-batch holds the two answers of ``batch.micro`` pairs, the chosen one first: ``input_ids`` and
``labels`` [2 p, s]. ``Step`` adds ``reference`` [2 p] before a step's first micro-batch, so that the weights
are exchanged once a step. Formulas: kernels/preference_loss/op.py.

Saved for backward: the last hidden states; the logits of a chunk of tokens are computed again. As in TRL's
trainer, dropout layers are switched off: the model and its reference must see the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainfit.spec.objective import Preference
from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Draw, Technique, refusal
from trainfit.techniques.draft import Draft
from trainfit.techniques.loss._hidden_states import loss_of
from trainfit.techniques.objective._answers import (
    FIELD,
    INSTEAD,
    check_reference,
    check_step,
    reference_of,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from trainfit.kernels.cross_entropy.chunked import Head
    from trainfit.kernels.preference_loss.op import PairLosses

DRAWN = ({"name": "dpo", "reference": "none"}, {"name": "dpo", "reference": "copy", "loss": "ipo"})


def reference_named(recipe: Recipe) -> str:
    """Return ``objective.reference``, and for ``auto`` what it stands for."""
    objective = recipe.objective
    assert isinstance(objective, Preference)
    if objective.reference != "auto":
        return objective.reference
    is_adapter = recipe.adapter is not None and not recipe.adapter.modules_to_save
    return "adapter-off" if is_adapter else "copy"


def check(recipe: Recipe) -> None:
    """Refuse what ``check_step`` refuses, packed data, and a reference that the model cannot be."""
    check_step(recipe)
    if recipe.data.pack == "documents":
        raise refusal(recipe, FIELD, "its sequences are single answers, not packed", "leave data.pack out")
    if not recipe.data.answers_only:
        problem = "prompts are no part of its loss"
        raise refusal(recipe, "data.answers_only", problem, "leave data.answers_only out")
    if (reference := reference_named(recipe)) != "none":
        check_reference(recipe, reference, "")


def apply(recipe: Recipe, draft: Draft) -> None:
    """Replace the loss; add what scores answers and pairs."""
    from trainfit.kernels.cross_entropy.chunked import Head, linear_cross_entropy
    from trainfit.kernels.cross_entropy.gradients_in_forward import IGNORED_LABEL
    from trainfit.kernels.cross_entropy.token_logs import linear_token_logs, token_logs
    from trainfit.kernels.preference_loss.op import pair_losses
    from trainfit.models.language_head import Setting, language_head
    from trainfit.models.packed import model_inputs

    objective = recipe.objective
    assert isinstance(objective, Preference)
    parts = language_head(draft.model, Setting(FIELD, objective.name, f"{INSTEAD}, or another model"))
    draft.body, fused = parts.body, recipe.loss == "fused"
    _switch_dropout_off(draft.model)
    means: list[Tensor] = []

    def inputs(batch: dict[str, Tensor]) -> tuple[Tensor, Head, Tensor]:
        hidden_bse = parts.hidden(**model_inputs(batch))
        head = Head(parts.layer.weight, parts.layer.bias, parts.scale, parts.softcap)
        return hidden_bse.flatten(0, 1), head, batch["input_ids"].roll(-1, dims=1).flatten()

    def counted(batch: dict[str, Tensor]) -> Tensor:
        """Return which positions' next tokens are of an answer, bool [b, s]."""
        found = batch["labels"].roll(-1, dims=1) != IGNORED_LABEL
        found[:, -1] = False
        return found

    def summed(logs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return (logs.view_as(batch["input_ids"]) * counted(batch)).sum(dim=1)

    def logs(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return summed(token_logs(*inputs(batch), fused=fused), batch)

    def of_pairs(logs: Tensor, batch: dict[str, Tensor]) -> PairLosses:
        return pair_losses(logs, batch["reference"], counted(batch).sum(dim=1), objective)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = of_pairs(summed(linear_token_logs(*inputs(batch), fused=fused), batch), batch)
        means.append(found.means())
        return found.losses.mean()

    def read() -> None:
        import torch

        draft.readings["pair_means"] = torch.stack(means[-draft.num_micro_batches :])
        means.clear()

    draft.loss, draft.token_logs, draft.pair_losses = loss, logs, of_pairs
    if not fused:  # Whose technique has set the cross-entropy.
        draft.cross_entropy = loss_of(draft, parts, linear_cross_entropy)
    if (reference := reference_named(recipe)) != "none":
        draft.reference = reference_of(reference)
    draft.batch_tensors = lambda ids_bs: {}
    draft.after_step.append(read)


def _switch_dropout_off(model: nn.Module) -> None:
    from torch import nn

    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def _describe(recipe: Recipe) -> str:
    objective, reference = recipe.objective, reference_named(recipe)
    assert isinstance(objective, Preference)
    kind = "dpo" if objective.loss == "sigmoid" else f"dpo ({objective.loss})"
    return {
        "none": f"{kind} without a reference", "copy": f"{kind} against a copy",
        "adapter-off": f"{kind} against the model without its adapter",
    }[reference]  # fmt: skip


TECHNIQUE = Technique(
    name="preference_loss",
    order=146,
    title="Preference loss",
    covers={FIELD: ("dpo",)},
    fields=("objective",),
    check=check,
    apply=apply,
    describe=_describe,
    examples=({"objective": {"name": "dpo", "reference": "copy"}},),
    draw=Draw(alone=lambda chance, _: {"objective": chance.choice(DRAWN)}),
)
