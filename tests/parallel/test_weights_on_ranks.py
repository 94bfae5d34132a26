"""Two ranks that read a folder's weights: the loss of one process, and each rank reads its part."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import weight_reads
from rank_processes import Ranks
from saved_weights import EXPERTS, loss_of, saved_weights

EQUAL = 1e-5
LORA = {"adapter": {"kind": "lora"}}
HALF, WHOLE = 0.5, 1.0
QUANTISED = 0.824
"""Every rank quantises the blocks' matrices, and keeps its part of the codes; it reads half of the rest."""
BY_ROWS = 0.611
"""Matrices whose columns are shared are read whole: a row has one scale. That is 20,480 bytes of 94,848."""


@pytest.mark.parametrize(
    ("kind", "implementation", "fields", "share"),
    [
        ("llama", "hf", {}, HALF),
        ("qwen3", "native", {}, HALF),
        ("qwen3", "hf", {"parallel": {"tensor": 2}}, HALF),
        ("qwen2", "native", {"parallel": {"tensor": 2}}, HALF),
        ("qwen3_moe", "hf", {}, HALF),
        ("qwen3_moe", "hf", {"parallel": {"expert": 2}}, HALF),
        ("llama", "hf", {"parallel": {"strategy": "ddp"}}, WHOLE),
        ("llama", "hf", LORA, HALF),
        ("llama", "native", {**LORA, "quantize": "nf4"}, QUANTISED),
        ("llama", "native", {**LORA, "quantize": "fp8", "parallel": {"tensor": 2}}, BY_ROWS),
        ("llama", "hf", {**LORA, "quantize": "int8", "parallel": {"tensor": 2}}, BY_ROWS),
    ],
    ids=str,
)
def test_ranks_start_from_the_weights(
    ranks: Ranks, kind: str, implementation: str, fields: dict[str, Any], share: float, tmp_path: Path
) -> None:
    theirs = saved_weights(tmp_path, kind, EXPERTS if "moe" in kind else {}, max_shard_size="50KB")
    files = [load_file(file) for file in tmp_path.glob("model*.safetensors")]
    num_bytes = sum(one.nbytes for own in files for one in own.values())
    for loss, of_alone, apart, bytes_read in ranks.run(
        weight_reads.started, tmp_path, implementation, fields
    ):
        assert loss == pytest.approx(of_alone, abs=EQUAL)
        if "quantize" not in fields:
            assert loss == pytest.approx(loss_of(theirs), abs=EQUAL)
        if implementation == "hf" or "tensor" not in fields.get("parallel", {}):  # Else in the ranks' order
            assert apart == 0
        assert bytes_read == pytest.approx(share * num_bytes, rel=0.02)
