"""``run``: an experiment's name in, a BenchResult out. ``experiments``: those there are, found by themselves."""

import importlib
import math
import pkgutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from trainfit.bench import experiments as folder
from trainfit.bench.harness.bench import Bench, Experiment, Point, cell_name, failures, told
from trainfit.bench.harness.signals import Signalled, Signals, signals_heard
from trainfit.bench.harness.stopwatch import stopwatch_of
from trainfit.bench.harness.timing import Rule
from trainfit.catalog import load as catalog
from trainfit.measurement.environment import cpu_name, host_environment
from trainfit.measurement.run import DEVICE
from trainfit.spec.bench import BenchResult, BenchRow
from trainfit.spec.errors import InputError
from trainfit.spec.hardware import Gpu
from trainfit.virtual.trace.frozen_gc import frozen_gc

Form = Literal["tiny", "full"]
RULES: dict[Form, Rule] = {
    "tiny": Rule(warmup=1, min_samples=6, max_samples=10, spread=0.5, cap_s=0.3, flush=False),
    "full": Rule(cap_s=1.0),
}
TINY_LIMIT_S = 60.0


def experiment_names() -> list[str]:
    """The names of the experiments: the files of ``experiments/``."""
    return sorted(module.name for module in pkgutil.iter_modules(folder.__path__))


def experiment(name: str) -> Experiment:
    """The experiment called ``name``.

    Raises:
        InputError: there is none.
    """
    if name not in experiment_names():
        raise InputError(
            "no such experiment", f"use {', '.join(experiment_names())}", field="NAME", value=name
        )
    return importlib.import_module(f"{folder.__name__}.{name}").EXPERIMENT


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
    """Run one experiment in this process. SIGTERM and Ctrl-C end it, and what was measured until then is a result too.

    Args:
        device: ``auto`` (CUDA if there is one), ``cpu``, ``cuda`` or ``cuda:1``; an experiment that is the host's runs on the CPU.
        form: None: full where the device is a GPU, tiny on a CPU.
        limit_s: no further point begins after so long; None: the experiment's own.
        on_row: hears each row as it is made.
        folder: write the experiment's files there (``Experiment.files``); None: write none.
        on_file: hears each file's path.
        only: the values wanted of each key of a point; rows of other points are not made.
        keep: is given the result before a signal may end the process; also that of a run that ended early, if it has a row.

    Raises:
        InputError: no such experiment or device, files asked of an experiment that has none, or ``only`` of what it has not.
        Signalled: SIGTERM or Ctrl-C ended it. An error that is no point's own is raised as it is.
    """
    start = time.perf_counter()
    asked, place = experiment(name), _device(device)
    form = form or ("full" if place.type == "cuda" else "tiny")
    if asked.on_host:
        place = torch.device("cpu")
    if folder is not None:
        _make(folder, asked)
    limit_s = limit_s if limit_s is not None else asked.limit_s if form == "full" else TINY_LIMIT_S
    stopwatch = stopwatch_of(place)
    gpu = data_sheet(place)
    bench = Bench(place, form, stopwatch, gpu, RULES[form], start + limit_s, folder, on_file)
    if only:
        bench.only = _only(asked, bench, only)
    environment = host_environment(str(place))  # Before anything can fail.
    with signals_heard() as signals:
        rows, cause = _rows(asked, bench, on_row, signals)
        if cause is not None and not rows:  # Nothing to keep.
            raise cause
        left = [] if cause is None else _left(asked, bench, rows, cause)
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
    asked: Experiment, bench: Bench, on_row: Callable[[BenchRow], None], signals: Signals
) -> tuple[list[BenchRow], BaseException | None]:
    """The rows that are asked for, and what ended the run early."""
    rows: list[BenchRow] = []
    try:
        # Between points garbage is collected, a quarter of a second where all of torch is looked at.
        with frozen_gc():
            for row in asked.run(bench):
                if bench.wants(row.point):
                    rows.append(row)
                    on_row(row)
        signals.hold()
    except BaseException as error:  # Whatever it is, what was measured is kept; ``run`` raises it.
        signals.hold()
        return rows, error
    return rows, None


def _left(asked: Experiment, bench: Bench, rows: list[BenchRow], cause: BaseException) -> list[BenchRow]:
    """Rows of the points that the run did not come to, as not-run."""
    done = {tuple(row.point.items()) for row in rows}
    reason = f"{cause} ended the run" if isinstance(cause, Signalled) else f"the run ended: {told(cause)[1]}"
    left: list[Point] = []
    with suppress(Exception):  # It may fail where the run did, which ``run`` raises.
        for row in _listed(asked, bench):
            if bench.wants(row.point) and tuple(row.point.items()) not in done:
                left.append(row.point)
    return list(failures(left, "not-run", reason))


def _listed(asked: Experiment, bench: Bench) -> Iterator[BenchRow]:
    """A row of every point: what a run has that may not begin any."""
    return asked.run(replace(bench, ends_at=-math.inf, folder=None))


def _only(asked: Experiment, bench: Bench, only: Mapping[str, Sequence[str]]) -> dict[str, frozenset[str]]:
    """``only``, held against the points that a run without time has.

    Raises:
        InputError: there is no such key or value.
    """
    there: dict[str, dict[str, None]] = {}
    for row in _listed(asked, bench):
        for key, cell in row.point.items():
            there.setdefault(key, {})[cell_name(cell)] = None
    for key, values in only.items():
        if key not in there:
            raise InputError(
                f"{asked.name} has no such key", f"use {', '.join(there)}", field="only", value=key
            )
        for one in values:
            if one not in there[key]:
                known = ", ".join(there[key])
                raise InputError(f"no {key} is so", f"use {known}", field="only", value=f"{key}={one}")
    return {key: frozenset(values) for key, values in only.items()}


def _make(folder: Path, asked: Experiment) -> None:
    if not asked.files:
        raise InputError(f"{asked.name} writes no files", "leave it out", field="files", value=str(folder))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot be made: {error.strerror}", "name a folder", field="files", value=str(folder)
        ) from error


def _device(name: str) -> torch.device:
    if not DEVICE.fullmatch(name):
        raise InputError("no such device", "use auto, cpu, cuda or cuda:1", field="device", value=name)
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    device = torch.device(name)
    if device.type == "cpu":
        return device
    if (device.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"this machine has {torch.cuda.device_count()} CUDA devices",
            "use cpu",
            field="device",
            value=name,
        )
    return torch.device("cuda", device.index or 0)  # ``torch.cuda.set_device`` takes none without a number.


def data_sheet(device: torch.device) -> Gpu | None:
    """The device's row of the catalog; None: a CPU, or a GPU that the catalog does not have."""
    if device.type != "cuda":
        return None
    try:
        return catalog.gpu_of_device(torch.cuda.get_device_name(device))
    except InputError:  # The result says so: its ``gpu`` is None.
        return None
