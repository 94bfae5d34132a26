"""Result of a benchmark: one typed row for each point; only a clean run has a number."""

import statistics
from typing import Any, Literal

from pydantic import model_validator

from trainfit.spec.value import Bytes, Count, Seconds, Value, disagreement

Cell = bool | int | float | str
BenchStatus = Literal[
    "done", "unsteady", "impossible", "throttled", "out-of-memory", "refused", "failed", "not-run"
]
SLOWDOWNS = (
    "hardware slowdown", "software thermal slowdown", "hardware thermal slowdown", "hardware power brake",
)  # fmt: skip
"""Reasons for low clocks that a faultless, cooled GPU does not have. The power cap is none: it holds the
clocks of every long step."""
WITHOUT_NUMBERS: tuple[BenchStatus, ...] = ("throttled", "out-of-memory", "refused", "failed", "not-run")


class Environment(Value):
    """Machine and versions of a measurement."""

    device: str  # Name of the GPU, or of the CPU
    device_bytes: Bytes
    cpu: str | None = None  # The host's: it decides the time of small steps. Older records lack it
    driver: str | None = None
    torch: str
    cuda: str | None = None
    transformers: str | None = None
    python: str
    platform: str
    clocks_mhz: dict[str, int] = {}
    """Sampled while the last timed step ran: ``sm``, ``memory``, and the most each can do."""
    throttled: tuple[str, ...] = ()
    """Why the driver held the clocks below their most while the steps were timed (NVML's names)."""
    variables: dict[str, str] = {}
    """Environment variables that change memory or speed, such as PYTORCH_CUDA_ALLOC_CONF."""
    commit: str | None = None

    @property
    def held_back(self) -> tuple[str, ...]:
        """Why times are no figures of the device: its driver held it back; empty: they are figures."""
        return tuple(reason for reason in SLOWDOWNS if reason in self.throttled)


class Spread(Value):
    """Samples of one quantity, in the order taken, and their summary."""

    samples: tuple[float, ...]
    median: float
    low: float  # 10th percentile
    high: float  # 90th percentile

    @classmethod
    def of(cls, samples: list[float]) -> "Spread":
        """Summarise at least one sample (nearest-rank percentiles)."""
        if not samples:
            raise ValueError("samples is empty: a spread needs at least one sample")
        ordered = sorted(samples)
        low, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.1, 0.9))
        return cls(samples=tuple(samples), median=statistics.median(ordered), low=low, high=high)


class Curve(Value):
    """A quantity over a step, for a plot: columns of equally many values.

    ``columns``: bytes by category, where a category that is not here is 0 throughout; or thousandths of each
    equal part of the step that the device computes and communicates.
    """

    phases: tuple[str, ...]  # Phase of the step of each point
    columns: dict[str, tuple[int, ...]]

    @model_validator(mode="after")
    def _equally_long(self) -> "Curve":
        lengths = {len(column) for column in self.columns.values()}
        if lengths - {len(self.phases)}:
            problem = f"{len(self.phases)} phases, columns of {sorted(lengths)}"
            raise disagreement(problem, "make them equally long", field="columns")
        return self


class BenchRow(Value):
    """One point of an experiment.

    ``status``: done: the median's confidence interval is narrow enough; unsteady: the time cap came first;
    impossible: faster than the data sheet allows, so there are times but no rates; throttled: the driver held
    the clocks down, so there are only bytes; refused: this device or version lacks it; not-run: the time
    limit came first, or the run was ended.
    """

    point: dict[str, Cell]  # Values that distinguish this row, such as ``{"seq": 256, "pass": "forward"}``
    status: BenchStatus
    message: str = ""
    times: Spread | None = None  # Seconds of each kept sample
    numbers: dict[str, Cell] = {}  # Results other than times, units in the names; dtypes are text
    discarded: Count = 0  # Samples discarded because they were throttled
    curve: Curve | None = None

    @model_validator(mode="after")
    def _no_number_without_a_clean_run(self) -> "BenchRow":
        # Throttling does not change sizes.
        timeless = self.status == "throttled" and all(name.endswith("_bytes") for name in self.numbers)
        has_numbers = self.times is not None or self.curve is not None or bool(self.numbers and not timeless)
        if self.status in WITHOUT_NUMBERS and has_numbers:
            problem = f"a row that is {self.status} has no numbers"
            raise disagreement(problem, "leave them out", field="status")
        if self.status == "impossible" and self.numbers:
            raise disagreement("an impossible time makes no rates", "leave them out", field="numbers")
        if self.status not in ("done", "unsteady") and not self.message:
            raise disagreement(f"a row that is {self.status} says why", "add a message", field="message")
        return self


class BenchResult(Value):
    """One run of one experiment."""

    experiment: str
    form: Literal["tiny", "full"]
    """tiny: seconds on a CPU, to show that it works; full: what is worth quoting."""
    rows: tuple[BenchRow, ...]
    environment: Environment
    gpu: str | None = None
    """The catalog's name of the device, whose data sheet bounds the times; None: not in the catalog."""
    limit_s: Seconds
    elapsed_s: Seconds
    settings: dict[str, Any] = {}
    """``flush_bytes``: written by the cache flush; ``cpu``: the host's processor. Older records also have the
    fields of the form's rule."""
