"""Input of every experiment, and the construction of its rows.

A row is made in one place, so whatever happens to a point (out of memory, refused, failed, no time left,
throttled, faster than possible) becomes a row with that status, and the experiment continues with its next
point. The methods that make rows receive the points first: where none of them is selected or no time is left,
nothing is built.
"""

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from trainfit.bench.harness.roofline import SLACK, Work, least_seconds
from trainfit.bench.harness.stopwatch import CpuStopwatch, Stopwatch
from trainfit.bench.harness.timing import TOTAL, Lap, Rule, Timing, take
from trainfit.measurement.meter import is_out_of_memory
from trainfit.spec.bench import BenchRow, Cell, Spread
from trainfit.spec.errors import InputError
from trainfit.spec.hardware import Gpu
from trainfit.spec.units import format_seconds

Point = dict[str, Cell]
Build = Callable[[], Callable[[Lap], object]]  # Makes tensors and modules, and returns the function to time
Rates = Callable[[float], Mapping[str, Cell]]  # Computes numbers from a median in seconds, such as TFLOP/s
Failure = tuple[Literal["out-of-memory", "refused", "failed", "not-run", "throttled"], str]
"""Status and message of a row without a result."""
Found = TypeVar("Found")


def cell_name(cell: Cell) -> str:
    """Return a point's value as typed on the command line: ``true``, ``16``, ``bf16``."""
    if isinstance(cell, bool):
        return str(cell).lower()
    return f"{cell:g}" if isinstance(cell, float) else str(cell)


@dataclass(frozen=True)
class Part:
    """A row to make of one lap of a run.

    Attributes:
        held: bytes, which hold for a row without a time too; read when the runs are over.
    """

    point: Point
    lap: str = TOTAL
    work: Work | None = None  # Least work of the lap, for the check against the data sheet
    rates: Rates = lambda seconds: {}
    held: Mapping[str, Cell] = field(default_factory=dict)
    has_host_time: bool = False  # Also record host_s, the median host time to issue the lap; not on a CPU


@dataclass
class Bench:
    """One run of one experiment on one device.

    Attributes:
        only: values selected for each key of a point, as ``cell_name`` writes them.
    """

    device: torch.device
    form: Literal["tiny", "full"]
    stopwatch: Stopwatch
    gpu: Gpu | None  # Data sheet; None: no time is checked against it
    rule: Rule
    ends_at: float  # Time on time.perf_counter after which no further point begins
    folder: Path | None = None  # Where traces and snapshots are written; None: nowhere
    on_file: Callable[[Path], None] = lambda path: None  # Called with the path of each file written
    only: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @property
    def tiny(self) -> bool:
        return self.form == "tiny"

    def wants(self, point: Point) -> bool:
        """Return whether ``point`` is selected."""
        return all(key in point and cell_name(point[key]) in values for key, values in self.only.items())

    def wanted(self, points: Iterable[Point]) -> list[Point]:
        """Return the selected ones of ``points``."""
        return [point for point in points if self.wants(point)]

    def keep(self, name: str, write: Callable[[Path], object]) -> None:
        """Write the file ``name`` with ``write``, if there is a folder for files."""
        if self.folder is not None:
            path = self.folder / name
            write(path)
            self.on_file(path)

    def left_s(self) -> float:
        """Return the seconds left of the experiment's limit."""
        return self.ends_at - time.perf_counter()

    def late(self) -> Failure | None:
        """Return the failure of a point that would begin now; None: it may begin."""
        return None if self.left_s() > 0 else ("not-run", "the experiment's time limit came first")

    def time(
        self,
        parts: list[Part],
        build: Build,
        rule: Rule | None = None,
        *,
        numbers: Mapping[str, Cell] | None = None,
        on_host: bool = False,
        needed_by: Sequence[Point] = (),
    ) -> Iterator[BenchRow]:
        """Yield rows of ``parts``, all from one series of runs of what ``build`` returns.

        Args:
            rule: replaces the experiment's rule; the time left caps it.
            numbers: added to every row after the rates; read when the runs are over.
            on_host: the work is the CPU's, whatever the device.
            needed_by: points computed from these rows' times: where one is selected, the series runs too.
        """
        rule = rule or self.rule

        def rows(timing: Timing) -> Iterator[BenchRow]:
            for part in parts:
                yield self.row(part if rule.flush else _warm(part), timing, numbers or {})

        points = [part.point for part in parts]
        yield from self.series(points, build, rule, rows, on_host=on_host, needed_by=needed_by)

    def series(
        self,
        points: Sequence[Point],
        build: Build,
        rule: Rule,
        rows: Callable[[Timing], Iterable[BenchRow]],
        *,
        on_host: bool = False,
        needed_by: Sequence[Point] = (),
    ) -> Iterator[BenchRow]:
        """Yield what ``rows`` makes of one series of samples, or why ``points`` have none; see ``time``."""

        def sample() -> Timing:
            stopwatch = CpuStopwatch() if on_host else self.stopwatch
            return take(build(), stopwatch, replace(rule, cap_s=min(rule.cap_s, self.left_s())))

        if self.wanted([*points, *needed_by]):
            yield from self.attempt(points, sample, rows)

    def find(self, point: Point, compute: Callable[[], Mapping[str, Cell]]) -> Iterator[BenchRow]:
        """Yield the row of numbers that ``compute`` returns without timing, if ``point`` is selected."""
        if self.wants(point):
            yield from self.attempt([point], lambda: value(point, **compute()), lambda row: [row])

    def attempt(
        self,
        points: Sequence[Point],
        find: Callable[[], Found],
        rows: Callable[[Found], Iterable[BenchRow]],
    ) -> Iterator[BenchRow]:
        """Yield what ``rows`` makes of what ``find`` returns, or why ``points`` have no result."""
        if (late := self.late()) is not None:
            yield from failures(points, *late)
            return
        try:
            found = find()
        except Exception as error:  # Any error is the result of these points.
            yield from failures(points, *failure_of(error))
        else:
            yield from rows(found)
        finally:
            self.tidy()

    def row(self, part: Part, timing: Timing, numbers: Mapping[str, Cell]) -> BenchRow:
        """Return one part's row, checked against the data sheet."""
        times = timing.spread(part.lap)
        if times is None:
            return BenchRow(
                point=part.point,
                status=timing.status,
                message=timing.message,
                discarded=timing.discarded,
                numbers=dict(part.held) if timing.status == "throttled" else {},
            )
        known: dict[str, Any] = {"point": part.point, "times": times, "discarded": timing.discarded}
        least_s = 0.0
        if part.work is not None and self.gpu is not None:
            least_s = least_seconds(part.work, self.gpu, self.stopwatch.flush_bytes)
        if times.median < SLACK * least_s:
            median = format_seconds(times.median)
            why = f"{median} is less than the {format_seconds(least_s)} that the data sheet allows"
            return BenchRow(**known, status="impossible", message=why)
        rates = {**numbers, **part.rates(times.median), **part.held}
        if part.has_host_time and self.device.type != "cpu":
            rates["host_s"] = Spread.of(timing.host[part.lap]).median
        return BenchRow(**known, status=timing.status, message=timing.message, numbers=rates)

    def tidy(self) -> None:
        """Free what a point left on a GPU, so that the next one has its whole memory."""
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


def _warm(part: Part) -> Part:
    """Return the part for runs without a flush: reads may come from the cache, so they bound nothing."""
    return part if part.work is None else replace(part, work=replace(part.work, cold_read_bytes=0.0))


def failure_of(error: BaseException) -> Failure:
    """Return the status and the one-line message that an exception gives a row."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    if is_out_of_memory(error):
        return ("out-of-memory", line)
    if isinstance(error, InputError):
        return ("refused", line)
    return ("failed", f"{type(error).__name__}: {line}")


def failures(points: Sequence[Point], status: Any, message: str) -> Iterator[BenchRow]:
    """Yield rows of points without a result."""
    for point in points:
        yield BenchRow(point=point, status=status, message=message)


def value(point: Point, **numbers: Cell) -> BenchRow:
    """Return a row of numbers that need no timing; ValueError where one is not finite."""
    for name, number in numbers.items():
        if isinstance(number, float) and not math.isfinite(number):
            raise ValueError(f"{name} = {number}: not a finite number")
    return BenchRow(point=point, status="done", numbers=numbers)


def of_work(flops: float = 0.0, num_bytes: float = 0.0, peak: float | None = None) -> Rates:
    """Return rates of this work: ``tflops_per_s``, ``gb_per_s`` and ``of_data_sheet``, where they apply.

    Args:
        peak: FLOP/s of the data sheet, or bytes per second where there are no FLOPs.
    """

    def rates(seconds: float) -> dict[str, Cell]:
        found: dict[str, Cell] = {}
        if flops:
            found["tflops_per_s"] = flops / seconds / 1e12
        if num_bytes:
            found["gb_per_s"] = num_bytes / seconds / 1e9
        if peak:
            found["of_data_sheet"] = (flops or num_bytes) / seconds / peak
        return found

    return rates


@contextmanager
def fp32_products(kind: Literal["fp32", "tf32"]) -> Iterator[None]:
    """Compute products of fp32 matrices in fp32 or in tf32 within the context."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if kind == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
