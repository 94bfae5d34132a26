"""How fast each attention kernel was measured to be, by GPU, dtype, head size and length: what ``attention: best`` chooses by.

Enters: ``attention.toml``, which ``python -m trainfit.report.attention_table`` writes from records. Leaves: frozen values. No torch.
"""

import functools
import math
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from trainfit.catalog.load import FOLDER, gpus
from trainfit.spec.errors import InputError
from trainfit.spec.hardware import PositiveFloat
from trainfit.spec.recipe import AttentionKernel
from trainfit.spec.value import PositiveInt, Value, parse

FILE = FOLDER / "attention.toml"
Dtype = Literal["bf16", "fp32"]
"""bf16 stands for fp16, too: the kernels and the tensor cores' rate are the same."""


class AttentionShape(Value):
    """Forward and backward of one shape: each kernel's median, all of one run and of the same inputs."""

    dtype: Dtype
    head: PositiveInt
    """Its size."""
    causal: bool
    seq: PositiveInt
    heads: PositiveInt
    batch: PositiveInt
    seconds: Annotated[dict[AttentionKernel, PositiveFloat], Field(min_length=2)]

    @property
    def key(self) -> tuple[str, int, bool, int]:
        return (self.dtype, self.head, self.causal, self.seq)


class AttentionRun(Value):
    """One record's shapes, and where they come from."""

    gpu: str
    """The catalog's name."""
    measured_at: str
    """The record's time, ISO 8601: it names the record."""
    commit: str = ""
    torch: str
    experiment: str
    shapes: Annotated[tuple[AttentionShape, ...], Field(min_length=1)]


class Found(NamedTuple):
    """The measurement nearest to what was asked."""

    run: AttentionRun
    shape: AttentionShape


@functools.cache
def attention_runs(path: Path = FILE) -> tuple[AttentionRun, ...]:
    """The runs of a file, checked.

    Raises:
        InputError: a GPU that the catalog does not have, a shape that is there twice, or a value that makes no sense.
    """
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    runs = tuple(parse(AttentionRun, row, file=path.name) for row in table.get("run", []))
    seen: set[tuple[object, ...]] = set()
    for run in runs:
        if run.gpu not in gpus():
            raise InputError(
                "no such accelerator", "use its catalog name", field="run.gpu", value=run.gpu, file=path.name
            )
        for shape in run.shapes:
            key = (run.gpu, *shape.key)
            if key in seen:
                raise InputError("measured twice", "keep one", field="run.shapes", value=key, file=path.name)
            seen.add(key)
    return runs


def nearest(
    runs: Sequence[AttentionRun], *, gpu: str, dtype: Dtype, head: int, seq: int, causal: bool = True
) -> Found | None:
    """The measured shape of this GPU, dtype and head size whose length is nearest, as a ratio; None: nothing is measured."""
    found = [
        Found(run, shape)
        for run in runs
        if run.gpu == gpu
        for shape in run.shapes
        if (shape.dtype, shape.head, shape.causal) == (dtype, head, causal)
    ]
    return min(found, key=lambda one: (abs(math.log(one.shape.seq / seq)), one.shape.seq), default=None)
