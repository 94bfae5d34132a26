"""LoRA over two tensor-parallel GPUs: losses and gradients of one GPU, by NCCL and the kernels of a GPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from adapter_shards import apart
from trainfit.bench.harness.processes import Rank, Ranks
from trainfit.spec.recipe import Adapter, Batch

CONFIG = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
IN_FP8 = {"kind": "fp8", "compute": "fp8"}
ROUNDED = {"fp32": 1e-4, "bf16": 0.03, "fp8": 0.1}
"""Largest difference of a gradient relative to its norm. In fp8 a row of inputs that two ranks share has two
scales in place of one."""
CASES: dict[str, tuple[dict[str, Any], float]] = {
    "fp32 over int8": ({"precision": "fp32", "quantize": "int8"}, ROUNDED["fp32"]),
    "fp32 over fp8, recomputed": (
        {"precision": "fp32", "quantize": "fp8", "recompute": "full"},
        ROUNDED["fp32"],
    ),
    "bf16": ({"precision": "bf16"}, ROUNDED["bf16"]),
    "bf16, products in fp8": ({"precision": "bf16", "quantize": IN_FP8}, ROUNDED["fp8"]),
    "bf16, products in fp8, compiled": (
        {"precision": "bf16", "quantize": IN_FP8, "compile": "block"},
        ROUNDED["fp8"],
    ),
}


def differences(rank: Rank, cases: dict[str, tuple[dict[str, Any], float]]) -> Iterator[tuple[float, ...]]:
    """Yield the differences of loss, gradients and weights between all ranks and this one alone."""
    for fields, _ in cases.values():
        options = {"adapter": Adapter(kind="lora", rank=8), "batch": Batch(micro=2, seq=64), **fields}
        yield apart("native", CONFIG, options, rank.world_size, rank.device)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_have_the_losses_and_gradients_of_one() -> None:
    cases = {
        name: case
        for name, case in CASES.items()
        if "products in fp8" not in name or torch.cuda.get_device_capability() >= (8, 9)
    }
    with Ranks(2, "cuda", differences, cases) as ranks:
        for name, (_, close) in cases.items():
            for loss, gradients, weights in ranks.results():
                assert loss <= close, name
                assert gradients <= close, name
                assert weights == 0, name
