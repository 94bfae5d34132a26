"""Phases of a policy's loop on the model of a step: rollout, scoring, reference."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import rank_policies
from rank_processes import Ranks
from test_policy_step import GRPO, recipe, whole_logs
from trainfit.rl.rollout import phases
from trainfit.spec.errors import InputError
from trainfit.step import Step, assemble

CPU = torch.device("cpu")
KL = {**GRPO, "kl": 0.1}
LORA = {"kind": "lora", "rank": 4}
TIED = {**rank_policies.MODEL, "model_type": "qwen2", "tie_word_embeddings": True}
PROMPTS = [[5, 6, 7], [11], [1, 2, 3, 4, 5, 6, 7, 8]]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as running:
        yield running


def changed(step: Step) -> None:
    """Move everything that trains."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in step.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("adapter", [None, LORA])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "amp-bf16"])
def test_generated_and_scored_log_probabilities_agree(adapter: Any, precision: str) -> None:
    objective = {**GRPO, "rollout": {"kv_cache": "fp32" if precision == "fp32" else "bf16"}}
    step = assemble(recipe(adapter=adapter, precision=precision, objective=objective), CPU)
    changed(step)
    with phases.generating(step):
        found = phases.generator_of(step, phases.sampling_of(step.recipe, (3, 4)))(PROMPTS)
    for prompt, one in zip(PROMPTS, found, strict=True):
        logs = phases.score(step, torch.tensor([[*prompt, *one.tokens]]))[0, len(prompt) - 1 : -1]
        assert logs.tolist() == pytest.approx(one.logs, abs=1e-4 if precision == "fp32" else 0.1)
    assert step.model.training


def test_one_call_at_a_time_is_the_generator() -> None:
    """What the prediction of the phases calls."""
    step = assemble(recipe(objective={**GRPO, "rollout": {"kv_cache": "fp32"}}), CPU)
    ids = torch.tensor([[5, 6, 7, 0], [8, 9, 10, 11]])
    lengths, slots = torch.tensor([3, 4]), torch.tensor([2, 0])
    with phases.generating(step):
        cache = phases.cache_of(step)
        assert (cache.num_slots, cache.num_positions) == (4, 16)
        first = phases.prefill(step, cache, slots, ids, lengths)
        filled = torch.zeros(4, dtype=torch.int64).index_copy(0, slots, lengths)
        second = phases.decode(step, cache, torch.tensor([1, 1, 2, 1]), filled)
        whole = step.model(torch.tensor([[5, 6, 7, 2]])).logits[0]
    torch.testing.assert_close(first[0], whole[2], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(second[2], whole[3], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("adapter", "reference"), [(None, "copy"), (LORA, "copy"), (LORA, "adapter-off")])
def test_the_reference_stays_as_it_was(adapter: Any, reference: str) -> None:
    step = assemble(recipe(adapter=adapter, objective={**KL, "reference": reference}), CPU)
    ids = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(1))
    at_first = whole_logs(step.model, ids).detach()
    changed(step)
    now = {name: parameter.detach().clone() for name, parameter in step.model.named_parameters()}
    torch.testing.assert_close(phases.score(step, ids, reference=True)[:, :-1], at_first[:, :-1])
    own = phases.score(step, ids)
    assert (own - at_first)[:, :-1].abs().max() > 0.01
    torch.testing.assert_close(own[:, :-1], whole_logs(step.model, ids).detach()[:, :-1])
    for name, parameter in step.model.named_parameters():
        assert torch.equal(parameter, now[name]), name
        assert parameter.requires_grad == (adapter is None or "lora" in name)


@pytest.mark.parametrize(
    "fields",
    [
        {"objective": {**KL, "reference": "copy"}},
        {"objective": KL, "adapter": LORA},
        {"objective": KL, "adapter": LORA, "quantize": "nf4"},
        {"objective": {**KL, "reference": "copy"}, "precision": "mixed-bf16"},
        {"objective": {**KL, "reference": "copy"}, "parallel": {"reshard_after_forward": False}},
        {"objective": {**KL, "reference": "copy"}, "parallel": {"strategy": "ddp"}},
        {"objective": {**KL, "reference": "copy"}, "model": {"config": TIED}, "recompute": "full"},
    ],
    ids=["full", "lora", "qlora", "mixed", "kept whole", "ddp", "tied"],
)
def test_two_ranks_generate_and_score_as_one(ranks: Ranks, fields: dict[str, Any]) -> None:
    bf16 = fields.get("precision") == "mixed-bf16"
    alone = {name: value for name, value in fields.items() if name != "parallel"}
    alone |= {"precision": "amp-bf16"} if bf16 else {}
    expected = rank_policies.phases_of(alone)
    for found in ranks.run(rank_policies.phases_of, {**fields, "hardware": {"gpu": "h200", "count": 2}}):
        if not bf16:
            assert found["tokens"] == expected["tokens"]
        for name in ("own", "reference", "own after an update", "reference after an update"):
            torch.testing.assert_close(
                found[name], expected[name], atol=0.1 if bf16 else 2e-3, rtol=0.1 if bf16 else 1e-3
            )
    assert (expected["own after an update"] - expected["own"]).abs().max() > 0.01
    torch.testing.assert_close(expected["reference after an update"], expected["own"], atol=1e-5, rtol=1e-5)


def test_what_cannot_generate_is_refused() -> None:
    with pytest.raises(InputError, match=r"native decoder.*model.implementation: native"):
        phases.check(recipe(model={"implementation": "hf"}))


@pytest.mark.parametrize("reference", ["copy", "adapter-off"])
def test_fake_tensors_pass_through_each_phase(reference: str) -> None:
    with FakeTensorMode():
        step = assemble(recipe(adapter=LORA, objective={**KL, "reference": reference}), CPU)
        ids, slots = torch.zeros(4, 8, dtype=torch.int64), torch.arange(4)
        lengths = torch.full((4,), 8)
        with phases.generating(step):
            cache = phases.cache_of(step)
            assert phases.prefill(step, cache, slots, ids, lengths).shape == (4, 50)
            assert phases.decode(step, cache, slots, lengths).shape == (4, 50)
        whole = torch.zeros(2, 16, dtype=torch.int64)
        assert phases.score(step, whole, reference=True).shape == phases.score(step, whole).shape == (2, 16)
