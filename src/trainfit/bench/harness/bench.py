"""What every experiment is given, and how its rows come to be.

A row is made in one place, so that whatever happens to a point (out of memory, refused, failed, no time left, clocks held down,
faster than possible) becomes a row that says so, and the experiment goes on to its next point. What makes a row (``Bench.time``,
``Bench.series``, ``Bench.find``) is told the points that it is for: where none of them is asked for, or no time is left, nothing is
built.
"""

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from trainfit.bench.harness.roofline import Work, is_impossible, least_seconds
from trainfit.bench.harness.stopwatch import CpuStopwatch, Stopwatch
from trainfit.bench.harness.timing import TOTAL, Lap, Rule, Timing, take
from trainfit.measurement.meter import is_out_of_memory
from trainfit.spec.bench import BenchRow, Cell, Spread
from trainfit.spec.errors import InputError
from trainfit.spec.hardware import Gpu
from trainfit.spec.units import format_seconds

Point = dict[str, Cell]
Rates = Callable[[float], Mapping[str, Cell]]
"""What follows from a median of so many seconds, such as TFLOP/s."""


def cell_name(cell: Cell) -> str:
    """A point's value as one writes it: ``true``, ``16``, ``bf16``."""
    return (
        str(cell).lower() if isinstance(cell, bool) else f"{cell:g}" if isinstance(cell, float) else str(cell)
    )


@dataclass(frozen=True)
class Part:
    """A row to be made of one lap of a run: its point, the work it does, and its rates."""

    point: Point
    lap: str = TOTAL
    work: Work | None = None
    rates: Rates = lambda seconds: {}
    held: Mapping[str, Cell] = field(default_factory=dict)
    """Bytes, which are true of a row without a time, too; read when the runs are over."""
    tells_host: bool = False
    """Also ``host_s``, the median of the host's seconds to ask for this part, until the call returned; never where it is the device."""


@dataclass
class Bench:
    """One run of one experiment on one device."""

    device: torch.device
    form: Literal["tiny", "full"]
    stopwatch: Stopwatch
    gpu: Gpu | None
    """The data sheet; None: nothing is called impossible."""
    rule: Rule
    ends_at: float
    """On ``time.perf_counter``: no further point begins."""
    folder: Path | None = None
    """Where files go that are too large for a record (traces, snapshots); None: none are written."""
    on_file: Callable[[Path], None] = lambda path: None
    """Hears of each file that was written."""

    only: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Points that are asked for: the values wanted of each key, as ``cell_name`` writes them."""

    def wants(self, point: Point) -> bool:
        """Whether a row of this point is asked for."""
        return all(key in point and cell_name(point[key]) in values for key, values in self.only.items())

    def wanted(self, points: Iterable[Point]) -> list[Point]:
        """Those of ``points`` of which a row is asked for."""
        return [point for point in points if self.wants(point)]

    def keep(self, name: str, write: Callable[[Path], object]) -> None:
        """Have ``write`` make the file ``name``, if files are asked for."""
        if self.folder is not None:
            path = self.folder / name
            write(path)
            self.on_file(path)

    @property
    def tiny(self) -> bool:
        return self.form == "tiny"

    def left_s(self) -> float:
        """Seconds of the experiment's limit that are left."""
        return self.ends_at - time.perf_counter()

    def late(self) -> "Failure | None":
        """What becomes of a point that would begin now; None: it may."""
        return None if self.left_s() > 0 else ("not-run", "the experiment's time limit came first")

    def time(
        self,
        parts: list[Part],
        build: Callable[[], Callable[[Lap], object]],
        rule: Rule | None = None,
        *,
        numbers: Mapping[str, Cell] | None = None,
        on_host: bool = False,
        needed_by: Sequence[Point] = (),
    ) -> Iterator[BenchRow]:
        """Rows of ``parts``, all from one series of runs of what ``build`` returns; none where none is asked for.

        Args:
            build: makes tensors and modules; its memory running out is a row, too.
            rule: other than the experiment's; the time that is left caps it.
            numbers: beside the rates in every row; read when the runs are over.
            on_host: the work is the CPU's, whatever the device.
            needed_by: points whose numbers are made with these rows' times: where one of them is asked for, these run too.
        """
        rule = rule or self.rule
        points = [part.point for part in parts]
        timing = self.series(points, build, rule, on_host=on_host, needed_by=needed_by)
        if not isinstance(timing, Timing):
            yield from timing
            return
        for part in parts:
            yield self.row(part if rule.flush else _warm(part), timing, numbers or {})

    def series(
        self,
        points: Sequence[Point],
        build: Callable[[], Callable[[Lap], object]],
        rule: Rule,
        *,
        on_host: bool = False,
        needed_by: Sequence[Point] = (),
    ) -> "Timing | list[BenchRow]":
        """The samples that rows of ``points`` are made of, or rows that say why there are none; no rows where none is asked for."""
        if not self.wanted([*points, *needed_by]):
            return []
        late = self.late()
        if late is not None:
            return list(failures(points, *late))
        rule = replace(rule, cap_s=min(rule.cap_s, self.left_s()))
        stopwatch = CpuStopwatch() if on_host else self.stopwatch
        failure: Failure | None = None
        try:
            return take(build(), stopwatch, rule)
        except Exception as error:  # Whatever it is, it is these points' result.
            failure = told(error)
        finally:
            self.tidy()
        return list(failures(points, *failure))

    def find(self, point: Point, ask: Callable[[], Mapping[str, Cell]]) -> Iterator[BenchRow]:
        """The row of what ``ask`` finds without a clock, if it is asked for."""
        if not self.wants(point):
            return
        failure = self.late()
        if failure is None:
            try:
                row = value(point, **ask())
            except Exception as error:  # Whatever it is, it is this point's result.
                failure = told(error)
            else:
                yield row
                return
        yield from failures([point], *failure)

    def row(self, part: Part, timing: Timing, numbers: Mapping[str, Cell]) -> BenchRow:
        """One part's row, held against the data sheet."""
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
        least_s = self._least_seconds(part.work)
        if least_s is not None and is_impossible(times.median, least_s):
            why = f"{format_seconds(times.median)} is less than the {format_seconds(least_s)} that the data sheet allows"
            return BenchRow(**known, status="impossible", message=why)
        rates = {**numbers, **part.rates(times.median), **part.held}
        if part.tells_host and self.device.type != "cpu":
            rates["host_s"] = Spread.of(timing.host[part.lap]).median
        return BenchRow(**known, status=timing.status, message=timing.message, numbers=rates)

    def _least_seconds(self, work: Work | None) -> float | None:
        if work is None or self.gpu is None:
            return None
        return least_seconds(work, self.gpu, self.stopwatch.flush_bytes)

    def tidy(self) -> None:
        """Give back what a point left, so that the next one has the whole memory."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _warm(part: Part) -> Part:
    """The part where the cache was not flushed: what is read may come from it, so the data sheet bounds no reads."""
    return part if part.work is None else replace(part, work=replace(part.work, cold_read_bytes=0.0))


Failure = tuple[Literal["out-of-memory", "refused", "failed", "not-run", "throttled"], str]


def told(error: BaseException) -> Failure:
    """What an exception makes of a row: its status and one line."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    if is_out_of_memory(error):
        return ("out-of-memory", line)
    if isinstance(error, InputError):
        return ("refused", line)
    return ("failed", f"{type(error).__name__}: {line}")


def failures(points: Sequence[Point], status: Any, message: str) -> Iterator[BenchRow]:
    """Rows of points that came to nothing."""
    for point in points:
        yield BenchRow(point=point, status=status, message=message)


def value(point: Point, **numbers: Cell) -> BenchRow:
    """A row of what is known without a clock.

    Raises:
        ValueError: a number is not finite, which is no result.
    """
    for name, number in numbers.items():
        if isinstance(number, float) and not math.isfinite(number):
            raise ValueError(f"{name} = {number}: not a finite number")
    return BenchRow(point=point, status="done", numbers=numbers)


def of_work(flops: float = 0.0, num_bytes: float = 0.0) -> Rates:
    """Rates of so much work: ``tflops_per_s`` and ``gb_per_s``, each where there is such work."""

    def rates(seconds: float) -> dict[str, Cell]:
        found: dict[str, Cell] = {}
        if flops:
            found["tflops_per_s"] = flops / seconds / 1e12
        if num_bytes:
            found["gb_per_s"] = num_bytes / seconds / 1e9
        return found

    return rates


@contextmanager
def fp32_products(kind: Literal["fp32", "tf32"]) -> Iterator[None]:
    """Products of fp32 matrices in fp32 or in tf32: their peaks differ eightfold, so none is left to chance."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if kind == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@dataclass(frozen=True)
class Experiment:
    """A file of ``experiments/``: what ``trainfit bench NAME`` runs."""

    name: str
    run: Callable[[Bench], Iterator[BenchRow]]
    limit_s: float
    """Seconds it may take in full form unless told otherwise."""
    on_host: bool = False
    """All of its work is the CPU's, whatever devices there are; its result is that CPU's."""
    files: str = ""
    """Which files it writes beside its rows; empty: none."""
