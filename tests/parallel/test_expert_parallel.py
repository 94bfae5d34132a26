"""Expert parallel training on two and four processes equals one process on all their batches."""

import importlib
from collections.abc import Iterator
from typing import Any

import pytest

import expert_training as cases
from rank_processes import Ranks
from trainfit.spec.recipe import Batch

EQUAL = 2e-6
ACCUMULATED = Batch(micro=1, seq=16, accumulate=2)


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")  # Once, before the forks.
    with Ranks(4) as running:
        yield running


@pytest.mark.parametrize("family", cases.FAMILIES)
def test_gradients_of_each_family_equal_one_process(ranks: Ranks, family: str) -> None:
    """Of routers, shared experts, biases and dense layers too; each rank's experts are on it alone."""
    assert max(ranks.run(cases.apart, family, {"expert": 2}, {})) <= EQUAL


@pytest.mark.parametrize(
    ("family", "mesh", "fields"),
    [
        ("gpt_oss", {"expert": 2}, {}),
        ("mixtral", {"expert": 2, "replicate": 2, "shard": 2}, {"batch": ACCUMULATED}),
        ("olmoe", {"expert": 2, "sync_each_batch": False}, {"batch": ACCUMULATED, "loss": "chunked"}),
        ("qwen3_moe", {"expert": 4}, {"recompute": "full"}),
        ("qwen3_moe", {"expert": 2, "reshard_after_forward": False}, {"recompute": "selective"}),
    ],
)
def test_gradients_over_four_ranks_equal_one_process(
    four: Ranks, family: str, mesh: dict[str, Any], fields: dict[str, Any]
) -> None:
    """Experts sharded by FSDP2, replicated, and on one rank each."""
    assert max(four.run(cases.apart, family, mesh, fields)) <= EQUAL


@pytest.mark.parametrize("expert", [2, 4])
def test_ranks_that_no_token_chooses_take_part(four: Ranks, expert: int) -> None:
    assert max(four.run(cases.apart, "qwen3_moe", {"expert": expert}, {}, one_sided=True)) <= EQUAL
