"""Kinds of operations other than elementwise work, and the shares of the data sheet of their rooflines.

A kind is a row of operation_kinds.toml. Operations in no row are elementwise work and copies, whose
calibrated rows stand for one another.
"""

import functools
import tomllib
from typing import Literal

from pydantic import NonNegativeFloat

from trainfit.catalog.load import FOLDER
from trainfit.spec.hardware import PositiveFloat, Share, Source
from trainfit.spec.parsing.parse import parse
from trainfit.spec.value import Value

FILE = FOLDER / "operation_kinds.toml"
OTHER = "other"


class OperationKind(Value):
    """Shares of an H200's data sheet that operations without calibrated rows are taken to reach."""

    operations: tuple[str, ...]
    """Names in aten, without overload and trailing underscore."""
    units: Literal["tensor", "cuda"] = "tensor"
    compute: Share  # Of the dense peak
    memory: Share  # Of the bandwidth
    passes: PositiveFloat = 1.0  # Over the least bytes: every input read once, every output written once
    copies: NonNegativeFloat = 0.0
    """Passes over these bytes by kernels before or after it, that copy to another layout."""
    position_s: NonNegativeFloat = 0.0
    """Seconds of each position of a recurrent layer, which waits for the one before."""
    source: Source


class OperationKinds(Value):
    """The rows of operation_kinds.toml by name."""

    kinds: dict[str, OperationKind]


@functools.cache
def operation_kinds() -> dict[str, OperationKind]:
    """Return the kinds by name."""
    rows = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return parse(OperationKinds, {"kinds": rows}, file=FILE.name).kinds


@functools.cache
def _kinds_by_operation() -> dict[str, str]:
    return {name: kind for kind, row in operation_kinds().items() for name in row.operations}


def kind_of(base_name: str) -> str | None:
    """Return the kind of an operation by its name, such as ``sort``; None: elementwise work or a copy."""
    return _kinds_by_operation().get(base_name)
