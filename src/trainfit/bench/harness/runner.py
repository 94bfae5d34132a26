"""Run an experiment by name and return its BenchResult."""

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from trainfit.bench.harness.bench import Bench, Point, cell_name, failure_of, failures
from trainfit.bench.harness.discovery import experiment
from trainfit.bench.harness.experiment import Experiment
from trainfit.bench.harness.stopwatch import stopwatch_of
from trainfit.bench.harness.timing import Rule
from trainfit.catalog import load as catalog
from trainfit.measurement.environment import cpu_name, host_environment
from trainfit.measurement.run import DEVICE
from trainfit.spec.bench import BenchResult, BenchRow
from trainfit.spec.errors import InputError
from trainfit.spec.hardware import Gpu
from trainfit.spec.stop import Stopped, StopSignal
from trainfit.virtual.trace.process_state import frozen_gc

Form = Literal["tiny", "full"]
RULES: dict[Form, Rule] = {
    "tiny": Rule(warmup=1, min_samples=6, max_samples=10, spread=0.5, cap_s=0.3, flush=False),
    "full": Rule(cap_s=1.0),
}
TINY_LIMIT_S = 60.0


def run(
    name: str,
    *,
    device: str = "auto",
    form: Form | None = None,
    limit_s: float | None = None,
    on_row: Callable[[BenchRow], None] = lambda row: None,
    folder: Path | None = None,
    on_file: Callable[[Path], None] = lambda path: None,
    only: Mapping[str, Sequence[str]] | None = None,
    keep: Callable[[BenchResult], None] = lambda result: None,
) -> BenchResult:
    """Run one experiment in this process; SIGTERM and Ctrl-C end it and keep what was measured.

    Args:
        device: ``auto`` (CUDA if there is one), ``cpu``, ``cuda`` or ``cuda:1``; ignored by an experiment on
            the host.
        form: None: full on a GPU, tiny on a CPU.
        limit_s: no further point begins after this time; None: the experiment's own limit.
        on_row: called with each row as it is made.
        folder: where the experiment writes its files (``Experiment.files``); None: it writes none.
        on_file: called with each file's path.
        only: values selected for each key of a point; rows of other points are not made.
        keep: called with the result before a signal can end the process, also after a run that ended early.

    Raises:
        InputError: no such experiment or device, ``folder`` of an experiment without files, or an ``only``
            that matches no point.
        Stopped: SIGTERM or Ctrl-C ended the run. An error that belongs to no point is raised as it is.
    """
    start = time.perf_counter()
    chosen, target = experiment(name), device_of(device)
    form = form or ("full" if target.type == "cuda" else "tiny")
    if chosen.on_host:
        target = torch.device("cpu")
    if folder is not None:
        _make(folder, name, chosen)
    limit_s = limit_s if limit_s is not None else chosen.limit_s if form == "full" else TINY_LIMIT_S
    stopwatch = stopwatch_of(target)
    gpu = data_sheet(target)
    bench = Bench(target, form, stopwatch, gpu, RULES[form], start + limit_s, folder, on_file)
    bench.only = _only(name, chosen, bench, only or {})
    environment = host_environment(str(target))  # Before anything can fail.
    with StopSignal(raises=True) as signals:
        rows, cause = _rows(chosen, bench, on_row, signals)
        if cause is not None and not rows:  # Nothing to keep.
            raise cause
        left = [] if cause is None else _left(chosen, bench, rows, cause)
        result = BenchResult(
            experiment=name, form=form, rows=(*rows, *left), environment=stopwatch.environment(environment),
            gpu=gpu.name if gpu else None, limit_s=limit_s, elapsed_s=time.perf_counter() - start,
            settings={"flush_bytes": stopwatch.flush_bytes, "cpu": cpu_name()},
        )  # fmt: skip
        keep(result)
    if cause is not None:
        raise cause
    return result


def _rows(
    chosen: Experiment, bench: Bench, on_row: Callable[[BenchRow], None], signals: StopSignal
) -> tuple[list[BenchRow], BaseException | None]:
    """Return the selected rows, and what ended the run early."""
    rows: list[BenchRow] = []
    try:
        # Garbage is collected between points, which takes 0.25 s unless torch's own objects are frozen.
        with frozen_gc():
            for row in chosen.run(bench):
                if bench.wants(row.point):
                    rows.append(row)
                    on_row(row)
        signals.raises = False
    except BaseException as error:  # ``run`` raises it after keeping the rows.
        signals.raises = False
        return rows, error
    return rows, None


def _left(chosen: Experiment, bench: Bench, rows: list[BenchRow], cause: BaseException) -> list[BenchRow]:
    """Return not-run rows of the points that the run did not reach."""
    done = {tuple(row.point.items()) for row in rows}
    stopped = isinstance(cause, Stopped)
    reason = f"{cause.name} ended the run" if stopped else f"the run ended: {failure_of(cause)[1]}"
    left: list[Point] = []
    with suppress(Exception):  # It may fail where the run did, which ``run`` raises.
        left += (row.point for row in _all_points(chosen, bench) if tuple(row.point.items()) not in done)
    return list(failures(bench.wanted(left), "not-run", reason))


def _all_points(chosen: Experiment, bench: Bench) -> Iterator[BenchRow]:
    """Yield a row of every point: those of a run without time."""
    return chosen.run(replace(bench, ends_at=-math.inf, folder=None))


def _only(
    name: str, chosen: Experiment, bench: Bench, only: Mapping[str, Sequence[str]]
) -> dict[str, frozenset[str]]:
    """Return ``only``, checked against the experiment's points."""
    known: dict[str, dict[str, None]] = {}
    for row in _all_points(chosen, bench) if only else ():
        for key, cell in row.point.items():
            known.setdefault(key, {})[cell_name(cell)] = None
    for key, values in only.items():
        if key not in known:
            raise InputError(f"{name} has no such key", f"use {', '.join(known)}", field="only", value=key)
        for one in (value for value in _joined(values, known[key]) if value not in known[key]):
            remedy = f"use {', '.join(known[key])}"
            raise InputError(f"no point of {name} has this {key}", remedy, field="only", value=f"{key}={one}")
    return {key: frozenset(_joined(values, known[key])) for key, values in only.items()}


def _joined(parts: Sequence[str], known: Collection[str]) -> list[str]:
    """Return the values whose parts between commas these are; a value may have commas itself."""
    by_parts = {tuple(part.strip() for part in name.split(",")): name for name in known}
    found: list[str] = []
    at = 0
    while at < len(parts):
        ends = range(len(parts), at, -1)
        end = next((end for end in ends if tuple(parts[at:end]) in by_parts), at + 1)
        found.append(by_parts.get(tuple(parts[at:end]), parts[at]))
        at = end
    return found


def _make(folder: Path, name: str, chosen: Experiment) -> None:
    """Create the folder of the experiment's files."""
    if not chosen.files:
        raise InputError(f"{name} writes no files", "leave it out", field="files", value=str(folder))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"cannot be made: {error.strerror}"
        raise InputError(why, "name a folder", field="files", value=str(folder)) from error


def device_of(name: str) -> torch.device:
    if not DEVICE.fullmatch(name):
        raise InputError("no such device", "use auto, cpu, cuda or cuda:1", field="device", value=name)
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    device = torch.device(name)
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise InputError(f"this machine has {count} CUDA devices", "use cpu", field="device", value=name)
    return torch.device("cuda", device.index or 0)  # ``torch.cuda.set_device`` needs an index.


def data_sheet(device: torch.device) -> Gpu | None:
    """Return the device's row of the catalog; None for a CPU or a GPU that the catalog lacks."""
    if device.type != "cuda":
        return None
    try:
        return catalog.gpu_of_device(torch.cuda.get_device_name(device))
    except InputError:  # The result records ``gpu`` as None.
        return None
