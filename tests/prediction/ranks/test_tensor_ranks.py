"""Predictions of a tensor-parallel rank: sizes by hand arithmetic, collectives, and what is refused."""

from collections import Counter
from functools import cache
from typing import Any

import pytest

from bench_rows import WHERE
from tiny_recipe import TINY_LLAMA, tiny_recipe
from trainfit.catalog.load import gpu
from trainfit.ledger.ledger import Ledger
from trainfit.prediction import communication
from trainfit.prediction.estimate import estimate, replay_on
from trainfit.prediction.machine import machine_with
from trainfit.prediction.time.roofline import step_times
from trainfit.prediction.trace import trace
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Batch, Hardware, Parallel, Recipe
from trainfit.spec.result import Measurement
from trainfit.spec.sweep import Row
from trainfit.techniques import registry
from trainfit.techniques.parallel import fsdp

LAYERS = 6
HIDDEN, FEATURES, VOCABULARY, HEADS, GROUPS, HEAD = 32, 64, 128, 4, 2, 8
TOKENS = 32
MATRICES = LAYERS * ((HEADS + 2 * GROUPS) * HEAD * HIDDEN + HEADS * HEAD * HIDDEN + 3 * FEATURES * HIDDEN)
NORMS = (2 * LAYERS + 1) * HIDDEN
INVERSE_FREQUENCIES = 16
HIDDEN_STATES = 4 * TOKENS * HIDDEN  # Bytes of all tokens' hidden states in fp32


def recipe(tensor: int, shard: int = 1, implementation: str = "native", **fields: Any) -> Recipe:
    mesh = {"hardware": Hardware(gpu="h200", count=tensor * shard), "parallel": Parallel(tensor=tensor)}
    return tiny_recipe(implementation, LAYERS, **(mesh | fields))


@cache
def ledger(tensor: int, shard: int = 1, whole: bool = False) -> Ledger:
    return trace(recipe(tensor, shard), whole=whole)


def weights(tensor: int, shard: int = 1) -> int:
    """Bytes of the storages that are parameters once the model is built."""
    found = ledger(tensor, shard, whole=True)
    held: dict[int, int] = {}
    for event in found.events:
        if found.segments[event.segment].step != "init":
            break
        storage = found.storages[event.storage]
        if event.kind:
            held[event.storage] = storage.num_bytes
        else:
            del held[event.storage]
    return sum(held.values())


def test_every_operation_of_a_rank_has_a_flop_rule() -> None:
    assert trace(recipe(2, implementation="hf")).ops_without_flops == ()


def test_a_rank_holds_its_share_of_each_matrix_and_whole_norms() -> None:
    for tensor, shard in ((2, 1), (2, 2)):
        matrices = (MATRICES + 2 * VOCABULARY * HIDDEN) // tensor
        assert weights(tensor, shard) == 4 * (matrices + NORMS) // shard + INVERSE_FREQUENCIES


def test_hidden_states_are_gathered_before_each_part_and_scattered_after_it() -> None:
    found = ledger(2)
    moved = Counter(
        (one.name, found.segments[one.segment].phase, one.num_bytes)
        for one in found.collectives
        for _ in range(found.times(one))
        if found.segments[one.segment].step == "steady"
    )
    assert moved == {
        ("all_reduce", "forward", HIDDEN_STATES): 1,  # The embedding
        ("all_gather", "forward", HIDDEN_STATES): 2 * LAYERS + 1,
        ("reduce_scatter", "forward", HIDDEN_STATES): 2 * LAYERS,
        ("all_reduce", "forward", 4 * TOKENS): 3,  # The loss: maximum, sum of exponentials, the label's logit
        ("reduce_scatter", "backward", HIDDEN_STATES): 2 * LAYERS + 1,
        ("all_gather", "backward", HIDDEN_STATES): 2 * LAYERS + 1,
        ("all_reduce", "optimizer", 4 * HIDDEN): 2 * LAYERS + 1,  # The norms' gradients
    }
    assert all(one.is_synchronous and (one.num_ranks, one.span) == (2, 2) for one in found.collectives)


def test_a_group_of_ranks_reads_one_batch() -> None:
    one = recipe(2, 2)
    found = estimate(one, machine_with(gpu("h200")), ledger(2, 2, whole=True))
    measured = Measurement(recipe_id="", status="done", step_s=0.5, environment=WHERE)
    row = Row(
        variant="one", recipe=one.content(), recipe_id="", status="done", estimate=found,
        measurement=measured,
    )  # fmt: skip
    assert (row.samples_per_s, row.tokens_per_s) == (2 * 2 / 0.5, 2 * TOKENS / 0.5)
    assert found.step_s is not None
    assert found.tokens_per_s == pytest.approx(2 * TOKENS / found.step_s)
    assert row.predicted_samples_per_s == pytest.approx(2 * 2 / found.step_s)


def test_layers_traced_once_equal_all_traced() -> None:
    short, whole = ledger(2), ledger(2, whole=True)
    assert short.repeats == (LAYERS - 3,)
    h200 = gpu("h200")
    assert replay_on(h200, short)[0].peak_allocated_bytes == replay_on(h200, whole)[0].peak_allocated_bytes
    assert communication.traffic(short, h200) == communication.traffic(whole, h200)


def test_the_computation_waits_for_the_tensor_group_and_not_for_the_shards() -> None:
    found = ledger(2, 2, whole=True)
    assert {one.is_synchronous for one in found.collectives if one.span == 2} == {True}
    assert {one.is_synchronous for one in found.collectives if one.span == 3} == {False}
    latency_s = communication.ring(2, 2, gpu("h200")).latency_s
    for at, exposed_s in step_times(found, machine_with(gpu("h200"))).exposed_s.items():
        here = [one for one in found.collectives if one.segment == at]
        total_s = sum(communication.collective_s(one, gpu("h200")) for one in here)
        least_s = sum(one.is_synchronous for one in here) * latency_s
        assert least_s <= exposed_s * (1 + 1e-9)
        assert exposed_s <= total_s * (1 + 1e-9)


def test_shards_of_a_tensor_parallel_rank_are_gathered_over_their_own_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fsdp, "MAX_TRACED_LAYERS", LAYERS - 1)
    found = trace(recipe(2, 2, "hf", recompute="full"))
    assert found.repeats == (LAYERS - 3,)
    groups = {(one.num_ranks, one.span) for one in found.collectives}
    assert groups == {(2, 2), (2, 3)}


def test_adapters_of_embedding_and_head_have_no_plan() -> None:
    for target in ("embed", "lm_head"):
        with pytest.raises(InputError, match=f"adapter of base_model.model.{target}"):
            trace(recipe(2, adapter={"kind": "lora", "targets": ("qkv", target)}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": {"config": {**TINY_LLAMA, "num_key_value_heads": 1}}}, "num_key_value_heads 1 cannot"),
        ({"model": {"config": {**TINY_LLAMA, "vocab_size": 127}}}, "vocab_size 127 cannot"),
        ({"model": {"config": {**TINY_LLAMA, "model_type": "olmo2"}}}, "no plan for olmo2"),
        ({"batch": Batch(micro=1, seq=17)}, "17 tokens cannot"),
        ({"parallel": Parallel(tensor=2, strategy="ddp")}, "whole weights"),
        ({"precision": "mixed-bf16"}, "FSDP2's own mixed precision"),
        ({"adapter": {"kind": "prompt"}}, "adapter.kind"),
        ({"adapter": {"kind": "lora", "dora": True}}, "adapter.dora"),
        ({"adapter": {"kind": "lora", "modules_to_save": ("lm_head",)}}, "adapter.modules_to_save"),
        ({"compile": "model"}, "compile"),
        ({"loss": "fused"}, "loss"),
    ],
)
def test_what_cannot_be_shared_or_was_not_tried_is_refused(fields: dict[str, Any], message: str) -> None:
    data = recipe(2, implementation="hf").model_dump()
    dumped = {name: one.model_dump() if hasattr(one, "model_dump") else one for name, one in fields.items()}
    with pytest.raises(InputError, match=message):
        registry.check(Recipe(**(data | dumped)))


def with_adapter(**fields: Any) -> Recipe:
    """Return a recipe over two ranks with LoRA on a base in fp8, of sizes that fp8 products take."""
    adapter = {"kind": "lora", "rank": 4, "dtype": "base"}
    one = recipe(2, precision="bf16", adapter=adapter, quantize={"kind": "fp8", "compute": "fp8"}, **fields)
    config = {**dict(one.model.config), "hidden_size": 2 * HIDDEN}  # pyright: ignore
    return one.model_copy(update={"model": one.model.model_copy(update={"config": config})})


@pytest.mark.parametrize("fields", [{"recompute": "full"}, {"compile": "block"}], ids=str)
def test_layers_with_adapters_traced_once_equal_all_traced(fields: dict[str, Any]) -> None:
    short, whole = (trace(with_adapter(**fields), whole=one) for one in (False, True))
    assert short.repeats == (LAYERS - 3,)
    h200 = gpu("h200")
    assert replay_on(h200, short)[0].peak_allocated_bytes == replay_on(h200, whole)[0].peak_allocated_bytes
    assert communication.traffic(short, h200) == communication.traffic(whole, h200)


def test_an_adapter_gathers_its_rank_of_each_token_and_sums_the_gradients_of_whole_matrices() -> None:
    found = trace(with_adapter())
    moved = Counter(
        (one.name, found.segments[one.segment].phase, one.num_bytes)
        for one in found.collectives
        for _ in range(found.times(one))
        if found.segments[one.segment].step == "steady"
    )
    hidden, low_rank = 2 * TOKENS * 2 * HIDDEN, 2 * TOKENS * 4  # Bytes in bf16
    assert moved["all_gather", "forward", low_rank] == 2 * LAYERS
    assert moved["reduce_scatter", "backward", low_rank] == 2 * LAYERS
    # The embedding is frozen, so that the first norm needs no gradient.
    assert moved["all_gather", "forward", hidden] == 2 * LAYERS + 1
    assert moved["reduce_scatter", "forward", hidden] == 2 * LAYERS
    assert moved["reduce_scatter", "backward", hidden] == 2 * LAYERS
    assert moved["all_gather", "backward", hidden] == 2 * LAYERS
    # A of qkv and up [4, hidden], and B of out and down [hidden, 4].
    assert moved["all_reduce", "optimizer", 2 * 4 * 2 * HIDDEN] == 4 * LAYERS
