"""Tables of evidence/pages/kernels.md from ``evidence/records/kernels/h200.jsonl``."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from trainfit.report.table import markdown_grid

FILE = Path(__file__).parents[2] / "records/kernels/h200.jsonl"
OPERATIONS = {
    "norm": "RMSNorm",
    "gates": "SwiGLU",
    "rotation": "rotary embedding",
    "update": "AdamW, bf16 weights",
}
PARTS = {"forward": "forward", "both": "forward and backward"}
LOSS = ("eager", "compiled", "ours chunked", "ours fused", "ours fused, 32 chunks")


@cache
def rows() -> tuple[dict[str, Any], ...]:
    """Return the rows of the benchmark of loss and block kernels."""
    return tuple(json.loads(line) for line in FILE.read_text("utf-8").splitlines())


def timed(case: str, way: str, part: str) -> dict[str, Any]:
    """Return the timed row of one way of a case."""
    (row,) = [row for row in rows() if (row["case"], row["way"], row["part"]) == (case, way, part)]
    return row


def loss() -> str:
    """Linear cross-entropy: time, rate and extra memory."""
    lines = []
    for way in LOSS:
        row = timed("loss", way, "both")
        lines.append(
            (
                way.replace("ours", "trainfit"),
                f"{row['ms']:.1f}",
                f"{row['tflops']:.0f}",
                f"{row['extra_bytes'] / 1e9:.2f}",
            )
        )
    return markdown_grid(("way", "ms", "TFLOP/s", "extra GB"), lines)


def blocks() -> str:
    """Block kernels and the optimizer's update: milliseconds against eager and compiled PyTorch."""
    lines = [
        (
            name,
            "update" if case == "update" else PARTS[part],
            *(f"{timed(case, way, part)['ms']:.3f}" for way in ("eager", "compiled", "ours")),
        )
        for case, name in OPERATIONS.items()
        for part in PARTS
        if (case, part) != ("update", "both")
    ]
    return markdown_grid(("operation", "pass", "eager, ms", "compiled, ms", "trainfit, ms"), lines, 2)


def _worst(case: str) -> float:
    return max(_ratios(case))


def _ratios(case: str) -> Iterator[float]:
    for row in rows():
        if row["case"] == case and row["part"] == "errors":
            yield row["of_eager"]
