"""GRPO and PPO: the clipped policy loss of completions, from hidden states, one chunk of tokens at a time.

A micro-batch holds, beside ``input_ids``, what the rollout gave for each position [b, s], fp32: ``old`` and
``reference`` log-probabilities of the next token, its ``advantages``, and ``weights``, which are 0 for
prompts and padding. A step averages its micro-batches and ranks, so the mean of their sums of weights is 1:
weights that sum to 1 over the update are multiplied by the number of both. Formulas:
kernels/policy_loss/op.py.

Saved for backward: the hidden states' gradients; no logits of all tokens exist.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainfit.spec.objective import Policy
from trainfit.spec.recipe import Loader, Recipe
from trainfit.techniques.base import Draw, Technique, refusal
from trainfit.techniques.draft import Draft
from trainfit.techniques.loss._hidden_states import expected_gradient, loss_of
from trainfit.techniques.objective._answers import (
    FIELD,
    INSTEAD,
    check_reference,
    check_step,
    reference_of,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

SHORT = {"kl": 0.0, "max_prompt": 8, "max_new": 8}
DRAWN = ({"name": "grpo", **SHORT}, {"name": "ppo", "per": "sequence", **SHORT})
TENSORS = ("old", "reference", "advantages", "weights")


def check(recipe: Recipe) -> None:
    """Refuse what ``check_step`` refuses, loaded or packed data, and lengths that do not agree."""
    policy = recipe.objective
    assert isinstance(policy, Policy)
    check_step(recipe)
    if recipe.loader != Loader():
        problem = "its sequences are generated, not loaded"
        raise refusal(recipe, FIELD, problem, "leave loader out")
    if recipe.data.pack is not True:
        raise refusal(
            recipe, FIELD, "its sequences are completions, which are not packed", "leave data.pack out"
        )
    if policy.max_tokens > recipe.batch.seq:
        problem = f"max_prompt + max_new is {policy.max_tokens}, batch.seq is {recipe.batch.seq}"
        raise refusal(recipe, FIELD, problem, f"write batch.seq: {policy.max_tokens}")
    if policy.measures_reference:
        check_reference(recipe, policy.reference, "objective.kl: 0, ")


def apply(recipe: Recipe, draft: Draft) -> None:
    """Replace the loss; the cross-entropy of evaluations is chunked or fused as well."""
    import torch

    from trainfit.kernels.cross_entropy.chunked import Head, linear_cross_entropy
    from trainfit.kernels.cross_entropy.token_logs import linear_token_loss, token_logs
    from trainfit.kernels.policy_loss.op import PolicyLoss
    from trainfit.models.language_head import Setting, language_head
    from trainfit.models.packed import model_inputs

    policy = recipe.objective
    assert isinstance(policy, Policy)
    parts = language_head(draft.model, Setting(FIELD, policy.name, f"{INSTEAD}, or another model"))
    draft.body, fused = parts.body, recipe.loss == "fused"
    if fused and parts.softcap is not None and policy.rollout.temperature != 1.0:
        problem = "its kernel divides by a temperature before the model's soft cap of logits"
        raise refusal(recipe, "loss", problem, "use loss: standard, or objective.rollout.temperature: 1")
    counted: list[Tensor] = []

    def inputs(batch: dict[str, Tensor]) -> tuple[Tensor, Head, Tensor]:
        hidden_bse = parts.hidden(**model_inputs(batch))
        head = Head(parts.layer.weight, parts.layer.bias, parts.scale, parts.softcap)
        # The last position's next token is not known; its weight is 0.
        return hidden_bse.flatten(0, 1), head, batch["input_ids"].roll(-1, dims=1).flatten()

    def logs(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = token_logs(*inputs(batch), temperature=policy.rollout.temperature, fused=fused)
        return found.view_as(batch["input_ids"])

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        hidden, head, targets = inputs(batch)
        old, reference, advantages, weights = (batch[name].flatten() for name in TENSORS)
        tokens = PolicyLoss(
            old, advantages, weights, policy.clip, policy.kl, reference if policy.measures_reference else None
        )
        found = linear_token_loss(
            hidden, head, targets, tokens,
            temperature=policy.rollout.temperature, expected_gradient=expected_gradient(draft), fused=fused,
        )  # fmt: skip
        counted.append(tokens.sums)
        return found

    def read() -> None:
        # Losses outside of a step are not of its update.
        draft.readings["policy_sums"] = torch.stack(counted[-draft.num_micro_batches :])
        counted.clear()

    draft.loss, draft.token_logs = loss, logs
    if not fused:  # Whose technique has set the cross-entropy of evaluations.
        draft.cross_entropy = loss_of(draft, parts, linear_cross_entropy)
    if policy.measures_reference:
        draft.reference = reference_of(policy.reference)
    draft.batch_tensors = _random_tensors
    draft.after_step.append(read)


def _random_tensors(ids_bs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return tensors of completions that fill the sequences, for steps on random tokens."""
    import torch

    like = torch.zeros(ids_bs.shape, dtype=torch.float32, device=ids_bs.device)
    weights = torch.full_like(like, 1 / like.numel())
    return {"old": like - 5, "reference": like - 5, "advantages": like + 1, "weights": weights}


def _describe(recipe: Recipe) -> str:
    policy = recipe.objective
    assert isinstance(policy, Policy)
    return f"{policy.name}, {policy.prompts} prompts x {policy.group}"


TECHNIQUE = Technique(
    name="policy_loss",
    order=147,
    title="Policy loss",
    covers={FIELD: ("grpo", "ppo")},
    fields=("objective",),
    check=check,
    apply=apply,
    describe=_describe,
    examples=({"objective": DRAWN[0]},),
    draw=Draw(alone=lambda chance, _: {"objective": chance.choice(DRAWN)}),
)
