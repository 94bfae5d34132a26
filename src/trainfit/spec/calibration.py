"""Calibration: what one device and its host were measured to take, as ``trainfit calibrate`` writes it."""

from typing import Any, NamedTuple

from trainfit.spec.bench import Environment
from trainfit.spec.value import Seconds, Value

FORMAT = 1
MAX_FILE_BYTES = 2**27


class OpTime(NamedTuple):
    """Seconds of one operation on the device, as the ledger describes it; in a file a list."""

    op: str
    dtype: str
    layout: str
    shape: tuple[int, ...]
    kernel: str
    head: int
    seq: int
    masked: bool
    flops: float
    num_bytes: int
    seconds: float
    part: str
    """The part of the calibration that ran it."""


class HostStep(Value):
    """Host seconds of a step so small that the device waits for the host: by phase, and the whole step."""

    recipe: dict[str, Any]
    issue_s: dict[str, Seconds]
    step_s: Seconds
    expected_s: Seconds | None = None
    """The step by the catalog's rates; in the catalog's own calibration alone."""


class CollectiveTime(Value):
    """Seconds of one collective of ``num_bytes`` (the whole tensor) over ``num_ranks`` GPUs of a host."""

    name: str
    num_ranks: int
    num_bytes: int
    seconds: Seconds


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
    ops: tuple[OpTime, ...] = ()
    host: dict[str, Seconds] = {}
    host_steps: tuple[HostStep, ...] = ()
    collectives: tuple[CollectiveTime, ...] = ()
    states: tuple[dict[str, float], ...] = ()
    """Clocks (MHz) and power (W) of the device, sampled under load."""
    failures: tuple[str, ...] = ()
