"""Tensor parallel training on two processes equals one process."""

from typing import Any

import pytest

import sharded_training as cases
from rank_processes import Ranks
from trainfit.spec.recipe import Batch

EQUAL = 1e-5


@pytest.mark.parametrize(
    ("implementation", "config", "fields"),
    [
        ("native", {"tie_word_embeddings": True}, {}),
        ("native", {"model_type": "qwen3", "head_dim": 8}, {"recompute": "selective"}),
        (
            "native",
            {
                "model_type": "trainfit",
                "position_embedding": "learned",
                "norm": "layernorm",
                "gated_mlp": False,
                "attention_bias": True,
                "mlp_bias": True,
            },
            {"batch": Batch(micro=1, seq=16, accumulate=2), "compile": "block"},
        ),
        ("hf", {}, {}),
        ("hf", {"attention_bias": True, "mlp_bias": True}, {"recompute": "full"}),
        ("hf", {"model_type": "mistral", "sliding_window": 8}, {}),
        ("hf", {"model_type": "qwen2", "tie_word_embeddings": True}, {}),
        ("hf", {"model_type": "qwen3", "head_dim": 8}, {}),
        ("hf", {"model_type": "smollm3", "pad_token_id": 3}, {}),
    ],
)
def test_losses_and_gradients_equal_one_process(
    ranks: Ranks, implementation: str, config: dict[str, Any], fields: dict[str, Any]
) -> None:
    assert max(ranks.run(cases.apart, implementation, config, fields, {"tensor": 2})) <= EQUAL
