"""Predictions of a context-parallel rank: FLOPs, memory and collectives against one GPU's."""

from functools import cache
from typing import Any

import pytest

from tiny_recipe import TINY_LLAMA, tiny_recipe
from trainfit.catalog.load import gpu
from trainfit.ledger.ledger import Ledger
from trainfit.prediction.estimate import estimate, replay_on
from trainfit.prediction.machine import machine_with
from trainfit.prediction.trace import trace
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Batch, Hardware, Parallel, Recipe
from trainfit.techniques import registry

LAYERS, MICRO, SEQ = 2, 2, 1024
KEYS = 4 * 2 * MICRO * SEQ * 2 * 8
"""Bytes in fp32 of a layer's keys and values: two key-value heads of 8 elements."""


def recipe(context: int, shard: int = 1, **fields: Any) -> Recipe:
    mesh = {"hardware": Hardware(gpu="h200", count=context * shard), "parallel": Parallel(context=context)}
    fields = {"batch": Batch(micro=MICRO, seq=SEQ), "attention": "triton"} | mesh | fields
    tiny = tiny_recipe("native", LAYERS, **fields)
    config = {**dict(tiny.model.config), "max_position_embeddings": SEQ}  # pyright: ignore
    return tiny.model_copy(update={"model": tiny.model.model_copy(update={"config": config})})


@cache
def ledger(context: int, shard: int = 1) -> Ledger:
    return trace(recipe(context, shard))


def test_ranks_share_a_sequences_flops_equally() -> None:
    for context in (2, 4):
        for flops in ("model_flops", "causal_flops"):
            share = ledger(context).steady_sum(flops) * context
            assert share == pytest.approx(ledger(1).steady_sum(flops), rel=1e-9)


def test_a_loss_without_all_logits_is_shared_too() -> None:
    one, two = (trace(recipe(context, loss="fused")) for context in (1, 2))
    assert 2 * two.steady_sum("model_flops") == pytest.approx(one.steady_sum("model_flops"), rel=1e-9)
    with pytest.raises(InputError, match="causal mask aligns queries with the first keys"):
        trace(recipe(2, attention="sdpa"))


def test_keys_and_values_are_gathered_in_each_layer_and_their_gradients_scattered() -> None:
    found = ledger(2, 2)
    waited = [one for one in found.collectives if one.is_synchronous]
    steady = [one for one in waited if found.segments[one.segment].step == "steady"]
    sizes = [(one.name, one.num_bytes) for one in steady if one.name != "all_reduce"]
    assert sizes == LAYERS * [("all_gather", KEYS)] + LAYERS * [("reduce_scatter", KEYS)]
    assert {(one.num_ranks, one.span) for one in waited} == {(2, 2)}
    # FSDP2's group has the ranks of all sequences and shards.
    assert {one.num_ranks for one in found.collectives if not one.is_synchronous} == {4}


def test_activations_shrink_with_more_ranks_and_a_step_has_the_tokens_of_one_batch() -> None:
    h200 = gpu("h200")
    one, two, four = (replay_on(h200, ledger(context))[0].breakdown.activations for context in (1, 2, 4))
    assert four < 0.6 * two < 0.4 * one
    found = estimate(recipe(2), machine_with(h200), ledger(2))
    assert found.step_s is not None
    assert found.tokens_per_s == pytest.approx(MICRO * SEQ / found.step_s)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention": "sdpa"}, "attention = 'sdpa'"),
        ({"batch": {"micro": 1, "seq": 18}}, "18 tokens cannot be cut into 4"),
        ({"model": {"config": {**TINY_LLAMA, "model_type": "mistral", "sliding_window": 8}}}, "plain causal"),
        ({"model": {"config": {"model_type": "gpt2"}}}, "plain causal"),
        ({"parallel": {"context": 2, "tensor": 2}, "hardware": {"count": 4}}, "parallel.tensor = 2"),
        ({"parallel": {"context": 2, "strategy": "ddp"}}, "parallel.strategy"),
        ({"compile": "block"}, "compile"),
    ],
)
def test_what_was_not_tried_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        registry.check(Recipe(**(recipe(2).model_dump() | fields)))
