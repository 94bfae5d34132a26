"""Calibration: what one device and its host were measured to take, as ``trainfit calibrate`` writes it."""

from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, Field

from trainfit.spec.bench import Environment
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.parse import parse
from trainfit.spec.value import PositiveInt, Seconds, Value, disagreement

FORMAT = 1
MAX_FILE_BYTES = 2**27
LEAST_S, MOST_S = 1e-10, 1e5
"""Less than any operation takes, and more than a whole calibration."""
Name = Annotated[str, Field(min_length=1)]
Size = Annotated[int, Field(ge=0, le=2**62)]
Taken = Annotated[float, Field(ge=LEAST_S, le=MOST_S)]
"""Measured seconds, by which others are divided."""


class OpTime(NamedTuple):
    """Seconds of one operation on the device, as the ledger describes it; in a file a list."""

    op: Name
    dtype: Name
    layout: str
    shape: tuple[Annotated[int, Field(ge=1, le=2**62)], ...]
    """Of a product: batch, rows, columns and the length that is summed; else empty."""
    kernel: str
    head: Size
    seq: Size
    masked: bool
    flops: Annotated[float, Field(ge=0, le=1e30)]
    num_bytes: Size
    seconds: Taken
    part: str
    """The part of the calibration that ran it."""


def _with_work(row: OpTime) -> OpTime:
    if len(row.shape) not in (0, 4):
        raise disagreement(
            "a shape has 4 lengths, or none", "calibrate again", field=f"ops, shape of {row.op}"
        )
    if not row.flops and not row.num_bytes:
        problem = "has neither FLOPs nor bytes"
        raise disagreement(problem, "calibrate again", field=f"ops, {row.op}")
    return row


class HostStep(Value):
    """Host seconds of a step so small that the device waits for the host: by phase, and the whole step."""

    recipe: dict[str, Any]
    issue_s: dict[str, Annotated[Seconds, Field(le=MOST_S)]]
    step_s: Taken
    expected_s: Taken | None = None
    """The step by the catalog's rates; in the catalog's own calibration alone."""


class CollectiveTime(Value):
    """Seconds of one collective of ``num_bytes`` (the whole tensor) over ``num_ranks`` GPUs of a host."""

    name: str
    num_ranks: PositiveInt
    num_bytes: Size
    seconds: Taken


class Calibration(Value):
    """Content of a calibration file.

    ``host``: seconds of one call of each kind, on tiny CPU tensors and, with ``launch`` in its name, on the
    device. ``failures``: parts and operations that were not measured, with the reason.
    """

    format: int = FORMAT
    gpu: str | None = None  # The catalog's name; None: a CPU, or a GPU that the catalog lacks
    created_at: str
    environment: Environment
    triton: str | None = None
    cpu: str
    elapsed_s: Seconds = 0.0
    ops: tuple[Annotated[OpTime, AfterValidator(_with_work)], ...] = ()
    host: dict[str, Taken] = {}
    host_steps: tuple[HostStep, ...] = ()
    collectives: tuple[CollectiveTime, ...] = ()
    states: tuple[dict[str, Annotated[float, Field(ge=0)]], ...] = ()
    """Clocks (MHz) and power (W) of the device, sampled under load."""
    failures: tuple[str, ...] = ()


def calibration_of(text: str | bytes, file: str) -> Calibration:
    """Return the calibration that a file holds.

    Raises:
        InputError: naming the first wrong field of ``file``.
    """
    from trainfit.spec.parsing.plain_data import parse_json

    data = parse_json(text, file)
    if not isinstance(data, dict) or "format" not in data:
        raise InputError("no calibration file", "name a file that trainfit calibrate wrote", file=file)
    if data["format"] != FORMAT:
        problem = f"this version reads format {FORMAT}"
        raise InputError(problem, "calibrate again", field="format", value=data["format"], file=file)
    return parse(Calibration, data, file=file)
