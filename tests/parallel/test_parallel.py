"""Training on several processes equals one process on the whole batch."""

import pytest
import torch

import data_parallel_cases as cases
import sharding_cases
from rank_processes import Ranks
from sharded_training import recipe_losses

EQUAL = 1e-6


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("naive", {}),
        ("flat", {"accumulate": 2}),
        ("overlapped", {"accumulate": 2}),
        ("bucketed", {"bucket_mb": 300 / 2**20}),
        ("bucketed", {"bucket_mb": None}),
        ("bucketed", {"model": cases.Skipping, "find_unused_parameters": True, "bucket_mb": 300 / 2**20}),
        ("naive", {"model": cases.Skipping, "find_unused_parameters": True}),
    ],
)
def test_data_parallel_equals_one_process(ranks: Ranks, strategy: str, options: dict[str, object]) -> None:
    assert max(ranks.run(cases.data_parallel, strategy, **options)) <= EQUAL


def test_torchs_own_wrapper_is_as_close(ranks: Ranks) -> None:
    assert max(ranks.run(cases.ddp)) <= EQUAL


def test_a_strategy_decides_how_many_all_reduces_begin_and_when(ranks: Ranks) -> None:
    # Gradients: the tied embedding 13 x 6, norm 6 + 6, up 11 x 6 + 11; the frozen layer has none.
    total = 4 * (78 + 12 + 77)
    expected = {
        ("naive",): (5, 0),
        ("flat",): (1, 0),
        ("overlapped",): (5, 5),
    }
    for (strategy,), (num, in_backward) in expected.items():
        for sizes, begun in ranks.run(cases.collectives_of, strategy):
            assert (len(sizes), begun, sum(sizes)) == (num, in_backward, total)
    for sizes, begun in ranks.run(cases.collectives_of, "bucketed", bucket_mb=360 / 2**20):
        assert sizes == [4 * (77 + 12), 4 * 78]
        assert begun == 2


def test_buckets_are_averaged_where_they_are_and_flat_copies_into_one_buffer(ranks: Ranks) -> None:
    assert ranks.run(cases.places_of_gradients, "bucketed") == [(True, 5)] * 2
    assert ranks.run(cases.places_of_gradients, "flat") == [(False, 1)] * 2


def test_a_dropped_wrapper_frees_its_module(ranks: Ranks) -> None:
    assert all(ranks.run(cases.memory_is_freed, "bucketed"))


def test_a_parameter_without_a_gradient_is_named(ranks: Ranks) -> None:
    for rank, message in enumerate(ranks.run(cases.a_missing_gradient)):
        assert "never.bias" in message
        assert ("sometimes.bias" in message) == (rank == 0)


def test_a_second_backward_names_no_sync(ranks: Ranks) -> None:
    assert all("no_sync()" in message for message in ranks.run(cases.a_second_backward))


@pytest.mark.parametrize("name", list(sharding_cases.OPTIMIZERS))
def test_a_sharded_optimizer_equals_the_unsharded_one(ranks: Ranks, name: str) -> None:
    results = ranks.run(sharding_cases.sharded_optimizer, name)
    assert all(parameters <= EQUAL and states <= EQUAL for parameters, states, _ in results)
    assert sorted(held for _, _, held in results) == [2, 3]


def test_a_saved_state_goes_on_at_another_world_size(ranks: Ranks) -> None:
    assert max(ranks.run(sharding_cases.resharded, 1)) <= EQUAL


@pytest.mark.parametrize(("by_module", "checkpointed"), [(True, False), (False, False), (True, True)])
def test_fully_sharded_equals_one_process(ranks: Ranks, by_module: bool, checkpointed: bool) -> None:
    for apart, held, total in ranks.run(sharding_cases.fully_sharded, by_module, checkpointed):
        assert apart <= EQUAL
        assert total / 2 <= held <= total / 2 + 3


def test_named_modules_stay_whole_and_their_gradients_are_averaged(ranks: Ranks) -> None:
    """The head's weight is the embedding's, so that stays whole as well."""
    for apart, held, messages in ranks.run(sharding_cases.partly_replicated):
        assert apart <= EQUAL
        whole = {"embed.weight": 13 * 6, "norm.weight": 6, "norm.bias": 6}
        assert held == whole | {"up.weight": 33, "up.bias": 6, "frozen.weight": 33, "frozen.bias": 3}
        assert len(messages) == 1
        assert "'norm' names no submodule" in messages[0]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_full_weights_are_not_kept_for_the_backward(ranks: Ranks, dtype: torch.dtype | None) -> None:
    width = 2 if dtype else 4
    for plain, sharded, dtypes in ranks.run(sharding_cases.saved_by, dtype):
        assert plain - sharded == 64 * 64 * width
        assert dtypes == {dtype or torch.float32}


LORA = {"kind": "lora", "rank": 4}


@pytest.mark.parametrize(
    "fields",
    [
        {"loss": "fused"},
        {"parallel": {"copy_engines": True}, "optimizer": {"clip_norm": 0.1}, "recompute": "full"},
        {"parallel": {"copy_engines": True, "reshard_after_forward": False}, "loss": "fused"},
        {"loss": "chunked", "adapter": LORA, "parallel": {"prefetch": 1}},
        {"quantize": "nf4", "adapter": LORA, "optimizer": {"clip_norm": 0.1}},
        {"quantize": "nf4", "adapter": LORA | {"dora": True, "modules_to_save": ("lm_head",)}},
        {"adapter": LORA | {"dora": True, "targets": ("qkv", "embed")}, "loss": "fused"},
        {"quantize": "fp8", "adapter": LORA, "recompute": "full"},
        {"quantize": "int8", "adapter": LORA, "parallel": {"reshard_after_forward": False}},
        {"optimizer": {"name": "adamw8bit"}, "precision": "bf16"},
        {"recompute": "full", "offload": {"activations": True}, "precision": "amp-fp16"},
        {"parallel": {"strategy": "bucketed"}, "precision": "amp-fp16", "optimizer": {"clip_norm": 0.1}},
        {"parallel": {"strategy": "zero1"}, "adapter": {"kind": "prompt"}},  # one rank owns no parameter
        {"parallel": {"strategy": "zero1"}, "optimizer": {"name": "muon"}},
    ],
    ids=str,
)
def test_a_recipe_on_ranks_loses_as_on_one(ranks: Ranks, fields: dict[str, object]) -> None:
    for losses, expected in ranks.run(recipe_losses, {"precision": "fp32", **fields}):
        assert losses == pytest.approx(expected, rel=EQUAL)
        assert losses[-1] != losses[0]


WIDE = {
    "model_type": "trainfit", "hidden_size": 64, "intermediate_size": 144, "num_hidden_layers": 2,
    "num_attention_heads": 40, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 128,
}  # fmt: skip
"""All products of a block multiply in fp8."""


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"recompute": "full", "parallel": {"reshard_after_forward": False}},
        {"parallel": {"strategy": "bucketed"}},
    ],
    ids=str,
)
def test_blocks_in_fp8_on_ranks_lose_as_on_one(ranks: Ranks, fields: dict[str, object]) -> None:
    """But for the largest magnitudes, which are those of each rank's own tokens."""
    model = {"implementation": "native", "config": WIDE}
    common = {"precision": "fp8", "block_kernels": "fp8", "model": model}
    for losses, expected in ranks.run(recipe_losses, {**common, **fields}):
        assert losses == pytest.approx(expected, rel=2e-3)
        assert losses[-1] != losses[0]


def test_blocks_in_fp8_share_sequences_as_torchaos_layers_do(ranks: Ranks) -> None:
    model = {"implementation": "native", "config": WIDE}
    common = {"precision": "fp8", "model": model, "parallel": {"context": 2}, "attention": "triton"}
    (found, _), _ = ranks.run(recipe_losses, {**common, "block_kernels": "fp8"})
    (expected, _), _ = ranks.run(recipe_losses, common)
    assert found == pytest.approx(expected, rel=2e-3)
    assert found != expected
