"""Context parallel training on two processes equals one process."""

from typing import Any

import pytest

import sharded_training as cases
from rank_processes import Ranks
from trainfit.spec.recipe import Batch

EQUAL = 1e-5


@pytest.mark.parametrize(
    ("implementation", "config", "fields"),
    [
        ("native", {"tie_word_embeddings": True}, {"batch": Batch(micro=2, seq=16, accumulate=2)}),
        (
            "native",
            {"model_type": "trainfit", "position_embedding": "learned", "norm": "layernorm"},
            {"recompute": "selective"},
        ),
        ("hf", {"model_type": "qwen3", "head_dim": 8}, {"recompute": "full"}),
        ("native", {}, {"loss": "fused", "recompute": "full"}),
        ("hf", {}, {"loss": "chunked", "batch": Batch(micro=2, seq=16, accumulate=2)}),
    ],
)
def test_losses_and_gradients_equal_one_process(
    ranks: Ranks, implementation: str, config: dict[str, Any], fields: dict[str, Any]
) -> None:
    fields = {"attention": "triton", **fields}
    assert max(ranks.run(cases.apart, implementation, config, fields, {"context": 2})) <= EQUAL
