"""Tables of evidence/pages/kernels.md from ``h200.jsonl`` and ``attention-h100.jsonl`` in records/kernels."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from trainfit.kernels.flash_attention.dispatch import (
    BACKWARD,
    CUDNN_BACKWARD,
    IN_PASSES,
    backward_groups,
)
from trainfit.kernels.flash_attention.triton_launch import FP32_TILES, Tiles
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


# -- attention of grouped heads on an H100

ATTENTION_FILE = Path(__file__).parents[2] / "records/kernels/attention-h100.jsonl"
GROUP = 4  # Query heads for each key head
OTHERS = ("cudnn", "flash", "efficient", "cudnn after our forward", "flash after our forward")
"""PyTorch's kernels; the last two called without autograd, as trainfit's were."""
PRODUCTS = {"forward": 2, "backward": 5}


@cache
def attention_seconds(dtype: str = "bf16") -> dict[tuple[int, int, str, str], float]:
    """Return the medians by head size, tokens, direction and name of the configuration."""
    lines = (json.loads(line) for line in ATTENTION_FILE.read_text("utf-8").splitlines())
    found = {}
    for row in lines:
        *of, head = str(row["d"]).split()  # "128", or "fp32 128"
        if row["kind"] == "time" and of == ([] if dtype == "bf16" else [dtype]):
            found[int(head), row["n"], row["direction"], row["name"]] = row["median_s"]
    return found


def fp32_ms(d: int) -> tuple[float, float]:
    """Return milliseconds of forward and backward in fp32 at 2,048 tokens: trainfit's, `efficient`'s."""
    seconds = {
        (direction, name): one
        for (head, _, direction, name), one in attention_seconds("fp32").items()
        if head == d
    }
    names = {kernel: _tiles(both[d > 64], "tf32x3") for kernel, both in FP32_TILES.items()}
    ours = seconds["prepare", "ptr"] + sum(seconds[kernel, name] for kernel, name in names.items())
    theirs = sum(seconds[direction, "efficient"] for direction in PRODUCTS)
    return 1e3 * ours, 1e3 * theirs


def _tiles(how: Tiles, loads: str) -> str:
    return f"{loads} {how.block_m}x{how.block_n} w{how.warps} s{how.stages}"


def backward_s(d: int, n: int, *, deterministic: bool = False) -> float:
    """Return the seconds of the backward that runs today; deterministic: of heads over 128."""
    seconds = attention_seconds()
    if d in BACKWARD and not deterministic:
        return seconds[d, n, "backward", f"gluon h{backward_groups(d, n, GROUP).heads_at_once}"]
    if d in CUDNN_BACKWARD and not deterministic:
        return seconds[d, n, "backward", "cudnn after our forward"]
    how = IN_PASSES[d]
    passes = (("values", how.values), ("only_keys", how.keys), ("queries", how.queries))
    return seconds[d, n, "prepare", "ptr"] + sum(
        seconds[d, n, name, _tiles(each, "tma")] for name, each in passes
    )
