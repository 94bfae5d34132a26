"""The result of an export. Free of torch."""

from typing import Literal

from trainfit.spec.value import Bytes, Count, Value

Dtype = Literal["fp32", "bf16", "fp16"]
MAX_SHARD_BYTES = 5 * 10**9
"""Largest file of weights by default."""


class Export(Value):
    """What was written."""

    folder: str
    kind: Literal["model", "adapter"]
    step: Count  # Of the checkpoint
    dtype: str  # Of most parameters
    parameters: Count
    weights_bytes: Bytes
    files: tuple[str, ...]
    base: str | None  # Weights that the run began with; None: random ones
    merged: bool  # An adapter is in the weights
    notes: tuple[str, ...] = ()
