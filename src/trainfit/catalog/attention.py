"""Measured speed of attention kernels by GPU, dtype, head size and length.

``attention: best`` chooses by the shapes, predicted times use the rates. ``python -m
evidence.scripts.attention_table`` writes attention.toml from records.
"""

import functools
import math
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, model_validator

from trainfit.catalog.load import FOLDER, gpus
from trainfit.spec.errors import InputError
from trainfit.spec.hardware import PositiveFloat
from trainfit.spec.parsing.parse import parse
from trainfit.spec.recipe import AttentionKernel
from trainfit.spec.value import PositiveInt, Value, disagreement

FILE = FOLDER / "attention.toml"
Dtype = Literal["bf16", "fp32"]  # bf16 includes fp16: kernels and tensor-core rates are the same
Kernel = Literal["cudnn", "flash", "efficient", "gluon", "passes", "plain"]
"""PyTorch's three; trainfit's for some 16-bit head sizes on Hopper (gluon), its backward of wider heads there
(passes), and those for all others (plain)."""
FORWARD_PRODUCTS = 2
BACKWARD_PRODUCTS = {"cudnn": 5, "flash": 5, "efficient": 5, "gluon": 5, "passes": 8, "plain": 7}
"""Matrix products of n x n x d that a kernel executes. The plain backward computes scores in both of its
two passes, the one in passes in three (virtual/cuda/flops.py)."""


class _Shape(Value):
    dtype: Dtype
    head: PositiveInt  # Its size
    causal: bool
    seq: PositiveInt
    heads: PositiveInt
    batch: PositiveInt


class AttentionShape(_Shape):
    """Forward and backward of one shape: each kernel's median, all of one run and of the same inputs."""

    seconds: Annotated[dict[AttentionKernel, PositiveFloat], Field(min_length=2)]
    spread: Annotated[dict[AttentionKernel, Annotated[float, Field(ge=0)]], Field(default_factory=dict)]
    """From the 10th to the 90th percentile, over the median."""

    @property
    def key(self) -> tuple[str, int, bool, int]:
        return (self.dtype, self.head, self.causal, self.seq)

    def are_equal(self, one: AttentionKernel, other: AttentionKernel) -> bool:
        """Return whether the two times differ by no more than half their combined spread."""
        scattered = sum(self.seconds[name] * self.spread.get(name, 0.0) / 2 for name in (one, other))
        return abs(self.seconds[one] - self.seconds[other]) <= scattered


class AttentionRate(_Shape):
    """One kernel's forward and backward, apart; medians, seconds."""

    kernel: Kernel
    forward: PositiveFloat
    backward: PositiveFloat
    masked: bool = False  # Given an additive mask as a tensor; every score is computed then

    @model_validator(mode="after")
    def _one_mask(self) -> "AttentionRate":
        if self.masked and self.causal:
            problem = "a mask given as a tensor, and is_causal: SDPA takes one of them"
            raise disagreement(problem, "leave out one", field="masked")
        return self

    @property
    def key(self) -> tuple[Kernel, str, int, int, bool]:
        return (self.kernel, self.dtype, self.head, self.seq, self.masked)

    @property
    def seconds_of_an_element(self) -> float:
        """Seconds of forward and backward for each pair of positions and column of a head."""
        pairs = self.seq * (self.seq + 1) / 2 if self.causal else self.seq**2
        return (self.forward + self.backward) / (self.batch * self.heads * pairs * self.head)

    def flops_per_s(self, *, backward: bool) -> float:
        """Return the FLOP/s, masked pairs not counted."""
        products = BACKWARD_PRODUCTS[self.kernel] if backward else FORWARD_PRODUCTS
        pairs = self.seq * (self.seq + 1) / 2 if self.causal else self.seq**2
        flops = 2.0 * products * self.batch * self.heads * pairs * self.head
        return flops / (self.backward if backward else self.forward)


class AttentionRun(Value):
    """Content of one record, and its origin."""

    gpu: str  # The catalog's name
    measured_at: str  # The record's time, ISO 8601: it names the record
    commit: str = ""
    torch: str
    experiment: str
    shapes: tuple[AttentionShape, ...] = ()
    rates: tuple[AttentionRate, ...] = ()

    @model_validator(mode="after")
    def _says_something(self) -> "AttentionRun":
        if not self.shapes and not self.rates:
            raise disagreement("a run of nothing", "leave it out", field="shapes")
        return self


class Found(NamedTuple):
    """The nearest measurement."""

    run: AttentionRun
    shape: AttentionShape


@functools.cache
def attention_runs(path: Path = FILE) -> tuple[AttentionRun, ...]:
    """Return the checked runs of a file; unknown GPUs, duplicates and invalid values are an InputError."""
    table, file = tomllib.loads(path.read_text(encoding="utf-8")), path.name
    runs = tuple(parse(AttentionRun, row, file=file) for row in table.get("run", []))
    seen: set[tuple[object, ...]] = set()
    for run in runs:
        if run.gpu not in gpus():
            remedy = "use its catalog name"
            raise InputError("no such accelerator", remedy, field="run.gpu", value=run.gpu, file=file)
        for one in (*run.shapes, *run.rates):
            key = (run.gpu, *one.key)
            if key in seen:
                raise InputError("measured twice", "keep one", field="run", value=key, file=file)
            seen.add(key)
    return runs


def nearest(
    runs: Sequence[AttentionRun], *, gpu: str, dtype: Dtype, head: int, seq: int, causal: bool = True
) -> Found | None:
    """Return the measured shape of this GPU, dtype and head size whose length is nearest, as a ratio."""
    found = [
        Found(run, shape)
        for run in runs
        if run.gpu == gpu
        for shape in run.shapes
        if (shape.dtype, shape.head, shape.causal) == (dtype, head, causal)
    ]
    return min(found, key=lambda one: (abs(math.log(one.shape.seq / seq)), one.shape.seq), default=None)


def nearest_rate(
    runs: Sequence[AttentionRun],
    *,
    gpu: str,
    kernel: str,
    dtype: Dtype,
    head: int,
    seq: int,
    masked: bool = False,
) -> AttentionRate | None:
    """Return the kernel's rate on this GPU at the nearest head size, then length, both as ratios.

    None: it is not measured in this dtype, with or without a mask tensor as requested.
    """
    found = [
        rate
        for run in runs
        if run.gpu == gpu
        for rate in run.rates
        if (rate.kernel, rate.dtype, rate.masked) == (kernel, dtype, masked)
    ]

    def distance(one: AttentionRate) -> tuple[float, int, float, int]:
        return abs(math.log(one.head / head)), one.head, abs(math.log(one.seq / seq)), one.seq

    return min(found, key=distance, default=None)
