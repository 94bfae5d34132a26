"""LoRA over tensor-parallel ranks equals one process: losses, gradients, and weights at the start."""

from collections.abc import Iterator
from typing import Any

import pytest

import adapter_shards as cases
from rank_processes import Ranks
from sharded_training import recipe_losses
from trainfit.spec.recipe import Adapter, Batch

EQUAL = 1e-5
"""Of losses, and of gradients relative to their norm, in fp32."""
LORA = Adapter(kind="lora", rank=4)


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4) as running:
        yield running


def assert_equal(found: list[tuple[float, float, float]], close: float = EQUAL) -> None:
    for loss, gradients, weights in found:
        assert loss <= close
        assert gradients <= close
        assert weights == 0


@pytest.mark.parametrize(
    ("implementation", "config", "fields"),
    [
        ("native", {"tie_word_embeddings": True}, {}),
        ("native", {"attention_bias": True, "mlp_bias": True}, {"recompute": "full"}),
        ("native", {"model_type": "qwen3", "head_dim": 8}, {"compile": "block"}),
        ("hf", {"attention_bias": True, "mlp_bias": True}, {"recompute": "selective"}),
        ("hf", {}, {"adapter": Adapter(kind="lora", rank=3, rslora=True, targets=("q_proj", "o_proj"))}),
        ("hf", {"model_type": "qwen2"}, {"batch": Batch(micro=1, seq=16, accumulate=2)}),
    ],
)
def test_losses_and_gradients_of_an_adapter_equal_one_process(
    ranks: Ranks, implementation: str, config: dict[str, Any], fields: dict[str, Any]
) -> None:
    fields = {"adapter": LORA} | fields
    assert_equal(ranks.run(cases.apart, implementation, config, fields, 2))


def test_four_ranks_share_an_adapter(four: Ranks) -> None:
    config = {"num_key_value_heads": 4}
    assert_equal(four.run(cases.apart, "native", config, {"adapter": LORA, "recompute": "full"}, 4))


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("implementation", ["native", "hf"])
def test_a_quantised_base_is_shared_by_rows_and_columns(ranks: Ranks, kind: str, implementation: str) -> None:
    """Every rank has its part of one process's codes and scales."""
    fields = {"adapter": LORA, "quantize": kind, "recompute": "full"}
    bias = {"attention_bias": True, "mlp_bias": True}
    assert_equal(ranks.run(cases.apart, implementation, bias, fields, 2))


@pytest.mark.parametrize("fields", [{"recompute": "full"}, {"compile": "block"}], ids=str)
def test_products_in_fp8_differ_by_their_rounding(ranks: Ranks, fields: dict[str, Any]) -> None:
    """A row of inputs that ranks share has a scale on each rank."""
    in_fp8 = {"adapter": LORA, "quantize": {"kind": "fp8", "compute": "fp8"}, **fields}
    for loss, gradients, weights in ranks.run(cases.apart, "native", {"hidden_size": 64}, in_fp8, 2):
        assert loss <= 1e-3
        assert gradients <= 0.1
        assert weights == 0


def test_layers_without_an_adapter_are_shared_quantised(ranks: Ranks) -> None:
    adapter = Adapter(kind="lora", rank=4, targets=("v_proj",))
    assert_equal(ranks.run(cases.apart, "hf", {}, {"adapter": adapter, "quantize": "fp8"}, 2))


@pytest.mark.parametrize("kind", ["fp8", "int8", None])
def test_groups_of_ranks_shard_over_one_another(four: Ranks, kind: str | None) -> None:
    """Tensor parallel over 2 within FSDP2 over 2: three steps have the losses of one process."""
    fields = {"parallel": {"tensor": 2}, "adapter": {"kind": "lora", "rank": 4}, "quantize": kind}
    for losses, expected in four.run(recipe_losses, {"precision": "fp32", **fields}):
        assert losses == pytest.approx(expected, abs=EQUAL)
