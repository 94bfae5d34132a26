"""A sweep's file beside what it left in ``results/NAME/``: what the generated pages of sweeps are made from.

Enters: the YAML file, and the folder that ``trainfit sweep FILE --out results/NAME`` wrote (``records.jsonl``), if it is there
yet. Leaves: a SweepResult, a Row a variant, and how one stands against the control.
"""

from dataclasses import dataclass
from pathlib import Path

from trainfit.records import load
from trainfit.report.sweep_table import overall_samples_per_s
from trainfit.spec.errors import InputError
from trainfit.spec.sweep import Row
from trainfit.sweeps.read import read_sweep
from trainfit.sweeps.rows import rows_of

RECORDS = "records.jsonl"
NOT_YET = "not measured yet"
NOT_PREDICTED = "not predicted yet"
ENDINGS = {"out-of-memory": "out of memory", "timeout": "out of time"}
"""Statuses in words; the others are words."""


@dataclass(frozen=True)
class SweepResult:
    """A sweep and what came of it so far."""

    name: str
    file: Path
    rows: tuple[Row, ...]

    @property
    def command(self) -> str:
        """What fills its rows."""
        return f"trainfit sweep {self.file.as_posix()} --out results/{self.name}"

    @property
    def devices(self) -> tuple[str, ...]:
        """Where rows were measured, each once, in the order of the rows."""
        told = [row.measurement.environment.device for row in self.rows if row.measurement]
        told += [row.train["run"]["device"] for row in self.rows if row.train]
        return tuple(dict.fromkeys(told))

    @property
    def torch_versions(self) -> tuple[str, ...]:
        """Under which rows were measured alone, each once."""
        return tuple(dict.fromkeys(row.measurement.environment.torch for row in self.rows if row.measurement))

    @property
    def trained_steps(self) -> int | None:
        """The fewest steps of its training runs that came to their end; None without any."""
        return min(
            (row.train["run"]["steps"] for row in self.rows if row.train and row.train["status"] == "done"),
            default=None,
        )

    @property
    def num_waiting(self) -> int:
        """Rows of which something is not measured yet."""
        return sum(is_waiting(row) for row in self.rows)

    def row(self, name: str) -> Row:
        """The variant's row.

        Raises:
            InputError: there is none of that name.
        """
        for row in self.rows:
            if row.variant == name:
                return row
        raise InputError("no such variant", f"add it to {self.file}", field="variant", value=name)

    def sentence(self) -> str:
        """How much of it is there."""
        done = len(self.rows) - self.num_waiting
        where = f" on {', '.join(self.devices)}" if self.devices else ""
        if not self.num_waiting:
            return f"All {len(self.rows)} rows were run{where}."
        if not done:
            return f"None of its {len(self.rows)} rows is measured yet: what stands here is predicted, without a GPU."
        return f"{done} of {len(self.rows)} rows were run{where}; the others are {NOT_YET}."


def read_result(file: Path, results: Path) -> SweepResult:
    """The sweep of ``file`` with the records of ``results/NAME/records.jsonl``; without that file every row waits.

    Raises:
        InputError: a bad file, or records of other training than the file asks for.
    """
    sweep = read_sweep(file)
    records = results / sweep.name / RECORDS
    found = load(records) if records.is_file() else []
    return SweepResult(sweep.name, file, rows_of(sweep, found))


def is_waiting(row: Row) -> bool:
    """Whether it has not come to an end, good or bad."""
    return row.status == "waiting"


def not_there(row: Row) -> str:
    """Why a row has no measured value."""
    if is_waiting(row):
        return NOT_YET
    return "–" if row.status == "done" else ENDINGS.get(row.status, row.status)


@dataclass(frozen=True)
class Compared:
    """A row against its sweep's control. Shares are of the control's value; None where a side is missing."""

    row: Row
    control: Row

    @property
    def predicted_reduction(self) -> float | None:
        """Of the peak, as predicted."""
        return _reduction(self.row.predicted_bytes, self.control.predicted_bytes)

    @property
    def reduction(self) -> float | None:
        """Of the measured peak."""
        return _reduction(self.row.measured_bytes, self.control.measured_bytes)

    @property
    def predicted_speed(self) -> float | None:
        """Times the control's."""
        return _ratio(self.row.predicted_samples_per_s, self.control.predicted_samples_per_s)

    @property
    def overall_speed(self) -> float | None:
        """Times the control's, of all steps."""
        return _ratio(overall_samples_per_s(self.row), overall_samples_per_s(self.control))

    @property
    def late_speed(self) -> float | None:
        """Times the control's, without the first steps."""
        return _ratio(late_samples_per_s(self.row), late_samples_per_s(self.control))

    @property
    def perplexity_change(self) -> float | None:
        """(row - control) / control."""
        ratio = _ratio(self.row.perplexity, self.control.perplexity)
        return None if ratio is None else ratio - 1


def late_samples_per_s(row: Row) -> float | None:
    """Without the first steps: of the training run (from ``LATE_FROM_STEP``), of a row that is only measured its median step."""
    if row.train is not None:
        return row.train["speed"]["late_samples_per_s"] if row.train.get("status") == "done" else None
    return row.samples_per_s


def _ratio(value: float | None, control: float | None) -> float | None:
    return value / control if value is not None and control else None


def _reduction(value: float | None, control: float | None) -> float | None:
    ratio = _ratio(value, control)
    return None if ratio is None else 1 - ratio
