"""Measured times of attention kernels, as the catalog's table has them."""

from typing import Any

from trainfit.catalog.attention import AttentionRun
from trainfit.spec.parsing.parse import parse

SHAPE: dict[str, Any] = {"dtype": "bf16", "head": 64, "causal": True, "seq": 1024, "heads": 16, "batch": 8}


def run_of(*shapes: dict[str, Any], gpu: str = "h200") -> AttentionRun:
    row = {"gpu": gpu, "measured_at": "2026-11-21T15:00:00+00:00", "torch": "2.11", "experiment": "flash"}
    return parse(AttentionRun, {**row, "shapes": [SHAPE | shape for shape in shapes]})


TABLE = (
    run_of(
        {"seconds": {"flash": 3e-3, "cudnn": 1.5e-3, "sdpa": 3.1e-3}},
        {"seq": 8192, "seconds": {"flash": 1e-3, "cudnn": 2e-3}},
    ),
)
