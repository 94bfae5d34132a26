"""The update of GRPO as a step: its loss, and what it refuses."""

from typing import Any

import pytest
import torch

from trainfit.prediction.predict import predict
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.recipe_file import merge, recipe_from
from trainfit.spec.recipe import Recipe
from trainfit.step import assemble
from trainfit.techniques import registry

MODEL = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 50, "max_position_embeddings": 64,
}  # fmt: skip
GRPO = {"name": "grpo", "kl": 0.0, "max_prompt": 8, "max_new": 8, "group": 2, "prompts": 2}


def recipe(**fields: Any) -> Recipe:
    base: dict[str, Any] = {
        "model": {"config": MODEL, "implementation": "native"}, "batch": {"micro": 2, "seq": 16},
        "precision": "fp32", "objective": GRPO, "hardware": {"gpu": "cpu"},
        "optimizer": {"implementation": "foreach", "lr": 1e-2},
    }  # fmt: skip
    return recipe_from(merge(base, fields))


def batch_of(step: Any, seed: int = 0) -> dict[str, torch.Tensor]:
    """Completions of 8 tokens after prompts of 8, with random advantages."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(50, (2, 16), generator=generator)
    counted = torch.zeros(2, 16)
    counted[:, 7:15] = 1
    advantages = torch.randn(2, 1, generator=generator).expand(2, 16).contiguous()
    old = whole_logs(step.model, ids).detach() + 0.1 * torch.randn(2, 16, generator=generator)
    return {
        "input_ids": ids, "labels": ids, "old": old, "reference": torch.zeros(2, 16),
        "advantages": advantages, "weights": counted / counted.sum(),
    }  # fmt: skip


def whole_logs(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logs = model(ids).logits.log_softmax(-1)
    return logs.gather(2, ids.roll(-1, dims=1)[..., None])[..., 0]


@pytest.mark.parametrize("loss", ["standard", "fused"])
@pytest.mark.parametrize("implementation", ["native", "hf"])
def test_the_loss_is_the_formula(implementation: str, loss: str) -> None:
    step = assemble(recipe(model={"implementation": implementation}, loss=loss), torch.device("cpu"))
    batch = batch_of(step)
    ratio = (whole_logs(step.model, batch["input_ids"]) - batch["old"]).exp()
    a = batch["advantages"]
    expected = (-torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a) * batch["weights"]).sum()
    expected.backward()
    gradients = [p.grad.clone() for p in step.model.parameters() if p.grad is not None]
    step.model.zero_grad()
    found = step.loss(batch)
    found.backward()
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    mine = [p.grad for p in step.model.parameters() if p.grad is not None]
    for one, other in zip(mine, gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def test_updates_raise_what_has_an_advantage() -> None:
    step = assemble(recipe(), torch.device("cpu"))
    batch = batch_of(step)
    batch["advantages"] = torch.tensor([[1.0], [-1.0]]).expand(2, 16).contiguous()
    before = whole_logs(step.model, batch["input_ids"])[:, 7:15].mean(1)
    for _ in range(3):
        step([batch])
    after = whole_logs(step.model, batch["input_ids"])[:, 7:15].mean(1)
    assert after[0] > before[0]
    assert after[1] < before[1]
    assert step.readings["policy_sums"].shape == (1, 4)


def test_two_micro_batches_make_the_update_of_one() -> None:
    """Weights that sum to 1 over the update are multiplied by the number of micro-batches."""
    whole = assemble(recipe(), torch.device("cpu"))
    halves = assemble(recipe(batch={"micro": 1, "accumulate": 2}), torch.device("cpu"))
    batch = batch_of(whole)
    rows = [{name: tensor[row : row + 1] for name, tensor in batch.items()} for row in range(2)]
    whole([batch])
    halves([row | {"weights": 2 * row["weights"]} for row in rows])
    for one, other in zip(whole.model.parameters(), halves.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)
    assert halves.readings["policy_sums"].shape == (2, 4)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"loss": "chunked"}, "replaces the next-token loss"),
    ({"batch": {"seq": 12}}, r"max_prompt \+ max_new is 16, batch.seq is 12; write batch.seq: 16"),
    ({"objective": {**GRPO, "kl": 0.1}}, "the reference would be the trained model itself"),
    ({"objective": {**GRPO, "group": 1}}, "grpo compares the completions of a prompt"),
    ({"objective": {**GRPO, "updates_per_rollout": 3}}, "4 completions do not divide"),
    ({"objective": "gpro"}, "no such objective; use one of pretrain, sft, dpo, grpo, ppo; did you mean grpo"),
    ({"loader": {"workers": 1}}, "its sequences are generated, not loaded"),
    ({"objective": {**GRPO, "name": "ppo", "group": 1, "prompts": 1}}, "one completion has no other"),
    ({"data": {"pack": False}}, "completions, which are not packed"),
]


@pytest.mark.parametrize(("fields", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_what_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        registry.check(recipe(**fields))


BALANCED = {
    "model_type": "qwen3_moe", "num_hidden_layers": 1, "output_router_logits": True, "hidden_size": 32,
    "moe_intermediate_size": 8, "num_experts": 4, "vocab_size": 97,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "more", "says"),
    [
        (BALANCED, {}, "balances its experts"),
        ({"model_type": "xglm", "num_layers": 1}, {}, "how xglm computes logits"),
        (MODEL, {"adapter": {"kind": "lora", "targets": ["lm_head"]}}, "not a plain linear layer"),
    ],
)
def test_a_model_without_a_known_output_layer_is_refused_by_the_objective(
    config: dict[str, Any], more: dict[str, Any], says: str
) -> None:
    base = recipe().model_dump(exclude_unset=True)
    refused = recipe_from(base | {"model": {"config": config}} | more)
    with pytest.raises(InputError, match=rf"objective.name = 'grpo': .*{says}.*use objective: pretrain"):
        assemble(refused, torch.device("meta"))


def test_a_soft_cap_takes_one_more_chunk_in_fp32() -> None:
    """Logits decide the peak of the forward: 1,024 tokens of a 4,000-word vocabulary, one chunk."""
    gemma = MODEL | {
        "model_type": "gemma2", "vocab_size": 4000, "head_dim": 16, "max_position_embeddings": 1024,
    }  # fmt: skip
    peaks: dict[float | None, int] = {}
    for cap in (None, 30.0):
        model = {"config": gemma | {"final_logit_softcapping": cap}, "implementation": "hf"}
        given = recipe().model_dump(exclude_unset=True) | {"model": model}
        found = predict(recipe_from(given | {"batch": {"micro": 1, "seq": 1024}, "attention": "eager"}))
        peaks[cap] = found.phases.steady.forward
    assert peaks[30.0] - peaks[None] == pytest.approx(1024 * 4000 * 4, rel=0.01)
