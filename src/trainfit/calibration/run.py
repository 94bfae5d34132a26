"""Calibrate this machine: run every part within a time limit and write what was measured to one file."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch

from trainfit.bench.harness.bench import failure_of
from trainfit.bench.harness.runner import data_sheet
from trainfit.bench.harness.stopwatch import Stopwatch, stopwatch_of
from trainfit.calibration.compiled import compiled_recipes, compiled_rows
from trainfit.calibration.host import costs, host_step, quick_steps, small_steps
from trainfit.calibration.op_timer import OpTimer, held_back
from trainfit.calibration.workloads import more_workloads, workloads
from trainfit.measurement.environment import cpu_name, host_environment
from trainfit.measurement.nvml import Nvml, Watched
from trainfit.prediction.time.calibrated import LEAST_STEPS
from trainfit.spec.bench import SLOWDOWNS
from trainfit.spec.calibration import Calibration, CollectiveTime, OpTime
from trainfit.spec.files import write_text
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.provenance import installed_version, now
from trainfit.spec.units import MB

LIMIT_S, HOST_LIMIT_S, COLLECTIVES_S = 280.0, 20.0, 40.0
COPY_BYTES = 2**28
NAMES = {"all-reduce": "all_reduce", "all-gather": "all_gather", "reduce-scatter": "reduce_scatter"}
"""The bench's names of collectives -> the ledger's."""
T = TypeVar("T")


class Run:
    """One calibration: what was found so far, and the time left.

    Args:
        host_only: measure no device.
        limit_s: no part begins, and no operation is timed, after this time.
        say: called with one line a part.
        out: file to which what was found is written after every part.
    """

    def __init__(
        self, device: torch.device, *, host_only: bool, limit_s: float, say: Callable[[str], None], out: Path
    ):
        self.device, self.host_only, self.limit_s, self.say, self.out = device, host_only, limit_s, say, out
        self.begun = time.perf_counter()
        self.gpu = data_sheet(device)
        self.stopwatch: Stopwatch = stopwatch_of(device)
        environment = self.stopwatch.environment(host_environment(str(device)))
        self.found = Calibration(
            gpu=self.gpu.name if self.gpu else None, created_at=now(), environment=environment,
            triton=installed_version("triton"), cpu=cpu_name(),
        )  # fmt: skip

    def run(self) -> Calibration:
        """Run every part; one that fails is noted and the others run."""
        for name, part in self._parts():
            if self._is_over():
                self._failed(name, f"not run: {self.limit_s:.0f} s were over")
                continue
            before = time.perf_counter()
            try:
                result = part()
            except Exception as error:
                self._failed(name, failure_of(error)[1])
                result = "failed"
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            self._keep(elapsed_s=time.perf_counter() - self.begun)
            self.say(
                f"{self.found.elapsed_s:5.0f} s  {name}: {result} ({time.perf_counter() - before:.1f} s)"
            )
        return self.found

    def _is_over(self) -> bool:
        return time.perf_counter() - self.begun > self.limit_s

    def _keep(self, **changes: Any) -> None:
        self.found = self.found.model_copy(update=changes)
        write_text(self.out, self.found.model_dump_json())

    def _failed(self, name: str, why: str) -> None:
        self._keep(failures=(*self.found.failures, f"{name}: {why}"))

    def _parts(self) -> Iterator[tuple[str, Callable[[], str]]]:
        on_gpu = self.device.type == "cuda"
        if self.host_only:
            yield from self._steps(quick_steps() if on_gpu else ())
            if len(self.found.host_steps) >= LEAST_STEPS:
                return  # A prediction needs nothing else.
        for name, measure in costs(self.device, compiled=not self.host_only):
            yield f"host, {name}", lambda n=name, m=measure: self._host_cost(n, m)
        if self.host_only:
            return
        steps = list(small_steps()) if on_gpu else []
        yield from self._steps(data for data in steps if not data.get("compile"))
        timer = OpTimer(self.stopwatch, self.gpu, self._is_over)
        for name, work in workloads(self.device, tiny=not on_gpu):
            yield name, lambda n=name, w=work: self._ops(timer, n, w)
        if on_gpu:
            yield "copies to and from the host", self._copies
            if torch.cuda.device_count() > 1:
                yield "collectives", self._collectives
            yield from self._compiled_parts(more=False)
            yield from self._steps(data for data in steps if data.get("compile"))
            if self.limit_s > LIMIT_S:
                for name, work in more_workloads(self.device):
                    yield name, lambda n=name, w=work: self._ops(timer, n, w)
                yield from self._compiled_parts(more=True)

    def _compiled_parts(self, *, more: bool) -> Iterator[tuple[str, Callable[[], str]]]:
        for name, data in compiled_recipes(more=more):
            yield f"compiled, {name}", lambda d=data: self._compiled(d)

    def _steps(self, some: Iterable[dict[str, Any]]) -> Iterator[tuple[str, Callable[[], str]]]:
        for data in some:
            name = ", ".join((data["model"]["name"], *(f"{k} {v}" for k, v in list(data.items())[2:])))
            yield f"host, step of {name}", lambda d=data: self._host_step(d)

    def _not_held(self, measure: Callable[[], T]) -> T:
        """Return what is measured on the device, unless its driver held it back meanwhile."""
        if self.device.type != "cuda":
            return measure()
        with Watched(Nvml(self.device.index or 0)) as watched:
            found = measure()
            watched.take()
        if reasons := watched.reasons & set(SLOWDOWNS):
            raise RuntimeError(held_back(reasons))
        return found

    def _host_cost(self, name: str, measure: Callable[[], float]) -> str:
        taken_s = measure()
        self._keep(host={**self.found.host, name: taken_s})
        return f"{taken_s * 1e6:.2f} us"

    def _host_step(self, data: dict[str, Any]) -> str:
        found = self._not_held(lambda: host_step(data, self.device))
        self._keep(host_steps=(*self.found.host_steps, found))
        return f"{found.step_s * 1e3:.2f} ms"

    def _ops(self, timer: OpTimer, name: str, work: Callable[[], object]) -> str:
        timer.part = name
        try:
            with timer:
                work()
        finally:
            timer.finish()
            rows, timer.rows = tuple(timer.rows), []
            self._keep(
                ops=self.found.ops + rows,
                failures=self.found.failures + tuple(timer.failures),
                states=self.found.states + tuple(timer.states),
            )
            timer.failures, timer.states = [], []
        return f"{len(rows)} operations"

    def _compiled(self, data: dict[str, Any]) -> str:
        rows = self._not_held(lambda: list(compiled_rows(recipe_from(data), self.device)))
        self._keep(ops=self.found.ops + tuple(rows))
        return f"{len(rows)} kernels"

    def _copies(self) -> str:
        host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
        other = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=self.device)
        for name, into, source in (("to_host", host, other), ("to_device", other, host)):
            into.copy_(source, non_blocking=True)
            start = self.stopwatch.mark()
            for _ in range(5):
                into.copy_(source, non_blocking=True)
            end = self.stopwatch.mark()
            self.stopwatch.wait()
            row = OpTime(
                f"trainfit.copy_{name}_.default", "uint8", "", (), "", 0, 0, False, 0.0, COPY_BYTES,
                self.stopwatch.between(start, end) / 5, "copies",
            )  # fmt: skip
            self._keep(ops=(*self.found.ops, row))
        return "both ways"

    def _collectives(self) -> str:
        from trainfit.bench.harness.runner import run as run_experiment

        rows = run_experiment("collectives", device="cuda", limit_s=COLLECTIVES_S).rows
        found = tuple(
            CollectiveTime(
                name=NAMES[str(row.point["collective"])], num_ranks=int(row.point["processes"]),
                num_bytes=int(float(row.point["size_mb"]) * MB), seconds=row.times.median,
            )
            for row in rows
            if row.times is not None and row.point["collective"] in NAMES
        )  # fmt: skip
        self._keep(collectives=found)
        return f"{len(found)} sizes"


def folder() -> Path:
    """Return the folder of this user's calibrations: $TRAINFIT_CALIBRATION, else in the user's data."""
    own = os.environ.get("TRAINFIT_CALIBRATION")
    base = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(own) if own else Path(base) / "trainfit" / "calibration"
