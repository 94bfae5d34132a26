"""The step of DPO: its loss and gradients against whole logits, its reference, and what it refuses."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch

import tiny_preferences
from rank_processes import Ranks
from tiny_preferences import LORA, MODEL, answer_logs, batches_of, preference, reference_logs
from trainfit.catalog.load import gpu
from trainfit.kernels.preference_loss.op import pair_losses
from trainfit.measurement.run import measure
from trainfit.prediction.predict import predict
from trainfit.prediction.trace import trace
from trainfit.prediction.traced_steps import run_evaluation
from trainfit.spec.errors import InputError
from trainfit.step import Step, assemble
from trainfit.techniques import registry

CPU = torch.device("cpu")


def moved(step: Step) -> None:
    """Move what trains away from the reference."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in step.model.parameters():
            if weight.requires_grad:
                weight += 0.05 * torch.randn(weight.shape, generator=generator)


@pytest.mark.parametrize(
    "objective",
    [{}, {"loss": "ipo", "beta": 0.3}, {"loss": "hinge"}, {"label_smoothing": 0.1}, {"reference": "none"}],
    ids=str,
)
@pytest.mark.parametrize(
    "fields",
    [{}, {"model": {"implementation": "hf"}}, LORA, {"loss": "fused"}],
    ids=["", "hf", "lora", "fused"],
)
def test_loss_and_gradients_are_those_of_whole_logits(
    objective: dict[str, Any], fields: dict[str, Any]
) -> None:
    recipe = preference(objective=objective, **fields)
    step = assemble(recipe, CPU)
    start = deepcopy(step.model)
    moved(step)
    (batch,) = step.with_reference(batches_of(recipe))
    if objective.get("reference") == "none":
        reference = torch.zeros(4)
    elif "adapter" in fields:
        with start.disable_adapter():  # type: ignore[operator]
            reference = reference_logs(start, batch)
    else:
        reference = reference_logs(start, batch)
    torch.testing.assert_close(batch["reference"], reference, atol=1e-4, rtol=1e-5)
    counts = (batch["labels"][:, 1:] >= 0).sum(dim=1)
    whole = pair_losses(answer_logs(step.model, batch), reference, counts, recipe.objective)  # type: ignore
    whole.losses.mean().backward()
    expected = [one.grad.clone() for one in step.model.parameters() if one.grad is not None]
    step.model.zero_grad()
    loss = step.loss(batch)
    loss.backward()
    found = [one.grad for one in step.model.parameters() if one.grad is not None]
    torch.testing.assert_close(loss, whole.losses.mean(), atol=1e-5, rtol=1e-5)
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-3)
    held_out = step.preferences(batch)
    torch.testing.assert_close(held_out[0], loss, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(held_out[1:], whole.means(), atol=1e-4, rtol=1e-4)


def test_the_first_loss_is_log_2_and_updates_prefer_the_chosen_answer() -> None:
    recipe = preference()
    step = assemble(recipe, CPU)
    batch = batches_of(recipe)
    losses = [step(batch).item() for _ in range(5)]
    assert losses[0] == pytest.approx(0.6931, abs=1e-4)
    assert losses == sorted(losses, reverse=True)
    chosen, rejected, accuracy = step.readings["pair_means"][0].tolist()
    assert chosen > 0 > rejected
    assert accuracy == 1


def test_dropout_is_off() -> None:
    recipe = preference(adapter={"kind": "lora", "rank": 4, "dropout": 0.5})
    step = assemble(recipe, CPU)
    moved(step)
    (batch,) = step.with_reference(batches_of(recipe))
    assert step.model.training
    assert step.loss(batch).item() == step.loss(batch).item() == pytest.approx(step.preferences(batch)[0])


def test_micro_batches_make_the_update_of_one() -> None:
    whole, halves = preference(batch={"micro": 4}), preference(batch={"micro": 2, "accumulate": 2})
    one, two = assemble(whole, CPU), assemble(halves, CPU)
    for seed in range(2):
        loss, other = one(batches_of(whole, seed=seed)), two(batches_of(halves, seed=seed))
        torch.testing.assert_close(loss, other, atol=1e-5, rtol=1e-4)
    assert two.readings["pair_means"].shape == (2, 3)
    means = [each.readings["pair_means"].mean(dim=0) for each in (one, two)]
    torch.testing.assert_close(*means, atol=1e-4, rtol=1e-3)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as running:
        yield running


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"batch": {"accumulate": 2}, "parallel": {"reshard_after_forward": False}},
        {**LORA, "quantize": "nf4"},
        {"recompute": "full"},
        {"parallel": {"strategy": "ddp"}},
    ],
    ids=["fsdp", "accumulated", "qlora", "recomputed", "ddp"],
)
def test_two_ranks_compute_the_losses_of_one(ranks: Ranks, fields: dict[str, Any]) -> None:
    alone = {name: value for name, value in fields.items() if name != "parallel"}
    count = fields.get("batch", {}).get("accumulate", 1)
    one = tiny_preferences.stepped({**alone, "batch": {"micro": 4, "accumulate": count}})
    both = {**fields, "hardware": {"gpu": "h200", "count": 2}}
    if count > 1:  # The ranks' shares are whole halves, not every second micro-batch.
        one = tiny_preferences.stepped({**alone, "batch": {"micro": 8}})
    first, second = ranks.run(tiny_preferences.stepped, both)
    losses = [sum(pair) / 2 for pair in zip(first["losses"], second["losses"], strict=True)]
    assert losses == pytest.approx(one["losses"], abs=1e-4)
    means = (first["means"] + second["means"]) / 2
    torch.testing.assert_close(means, one["means"], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(first["held out"], one["held out"], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    "fields",
    [{}, LORA, {"recompute": "full"}, {"loss": "fused"}],
    ids=["copy", "lora", "recomputed", "fused"],
)
def test_the_predicted_memory_is_the_measured(fields: dict[str, Any]) -> None:
    recipe = preference(model={"config": MODEL | {"num_hidden_layers": 5}}, **fields)
    predicted, measured = predict(recipe, use_cache=False), measure(recipe, steps=1, device="cpu")
    assert measured.phases is not None, measured.message
    assert measured.peak_allocated_bytes == pytest.approx(predicted.peak_allocated_bytes, rel=0.01)
    for phase in ("forward", "backward", "optimizer"):
        found = getattr(measured.phases.steady, phase)
        assert found == pytest.approx(getattr(predicted.phases.steady, phase), rel=0.01), phase
    assert measured.tokens_per_s == pytest.approx(2 * 2 * 16 / measured.step_s)  # type: ignore[operator]


@pytest.mark.parametrize("fields", [{}, LORA], ids=["copy", "lora"])
def test_repeated_layers_stand_for_all(fields: dict[str, Any]) -> None:
    config = MODEL | {"num_hidden_layers": 6}
    recipe = preference(model={"config": config}, precision="bf16", hardware={"gpu": "h100-sxm"}, **fields)
    few, whole = trace(recipe), trace(recipe, whole=True)
    assert few.repeat > 1
    for name in ("model_flops", "causal_flops"):
        assert few.steady_sum(name) == whole.steady_sum(name)
    assert predict(recipe, use_cache=False).peak_allocated_bytes > 0


def test_flops_of_a_pair() -> None:
    """Two sequences forward and backward, and forward by the reference; the second logits are no model's."""
    plain = preference(objective="pretrain", batch={"micro": 4}, loss="chunked", hardware={"gpu": "h100-sxm"})
    pairs = preference(hardware={"gpu": "h100-sxm"}, objective={"reference": "none"})
    copy = preference(hardware={"gpu": "h100-sxm"})
    flops, alone, both = (trace(one).steady_sum("model_flops") for one in (plain, pairs, copy))
    assert alone == flops
    assert both == pytest.approx(flops * 4 / 3, rel=0.01)
    head = 2 * 4 * 16 * 32 * 300
    assert trace(pairs).steady_sum("causal_flops") - alone == pytest.approx(head, rel=0.06)
    fused = preference(hardware={"gpu": "h100-sxm"}, loss="fused")
    assert trace(fused).steady_sum("model_flops") == both


def test_an_evaluation_is_traced() -> None:
    recipe = preference(hardware={"gpu": "h100-sxm"}, precision="bf16")
    ledger = trace(
        recipe, gpu("h100-sxm"), run=lambda step, virtual: run_evaluation(step, virtual, sequences=4)
    )
    assert any(segment.step == "evaluation" for segment in ledger.segments)


def test_sft_is_pretrain_by_another_name() -> None:
    assert preference(objective="sft").id == preference(objective="pretrain").id
    assert preference(objective={"name": "sft"}).objective.name == "pretrain"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"loss": "chunked"}, "replaces the next-token loss"),
    ({"data": {"pack": "documents"}}, "single answers, not packed"),
    ({"data": {"answers_only": False}}, "prompts are no part of its loss"),
    ({"objective": {"name": "dpo", "reference": "adapter-off"}}, "would be the trained model itself"),
    ({"objective": {"name": "dpo", "beta": 0}}, "objective.beta"),
    ({"objective": {"name": "dpo", "loss": "ipo", "label_smoothing": 0.1}}, "no labels that are smoothed"),
    ({"objective": {"name": "dpo", "group": 4}}, "objective.group"),
    ({"hardware": {"gpu": "h100-sxm", "count": 2}, "parallel": {"tensor": 2}}, "not divided over parallel"),
    ({"adapter": {"kind": "prefix"}}, "use objective: pretrain"),
]


@pytest.mark.parametrize(("fields", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_what_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        registry.check(preference(**fields))
