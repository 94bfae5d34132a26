"""What step times are computed with: operations timed on one GPU, the rates of a step. No torch here.

The catalog has those of one H200 and one H100, and of the hosts of measured steps; another GPU takes those of
its reference. A file that ``trainfit
calibrate`` wrote replaces the operations for recipes of its GPU, and rescales the host's costs by the small
steps that it measured.
"""

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from trainfit.catalog import names
from trainfit.catalog.load import FOLDER
from trainfit.catalog.rates import Rates, rates
from trainfit.prediction.time.op_times import OpTimes
from trainfit.spec.calibration import MAX_FILE_BYTES, Calibration, HostStep, calibration_of
from trainfit.spec.errors import InputError
from trainfit.spec.files import read_text
from trainfit.spec.hardware import Gpu
from trainfit.spec.value import canonical_json

LEAST_STEPS = 4
"""Small steps that a calibration must have for the host to be rescaled by them."""
OPTIONAL_COSTS = {"compiled", "launch"}
"""Words in the names of host costs that a calibration lacks if made without a GPU, or cut short."""
_chosen: ContextVar[str | None] = ContextVar("calibration", default=None)


@dataclass(frozen=True, eq=False)
class Calibrated:
    """Operations timed on a GPU and rates of a step."""

    gpu: str
    times: OpTimes
    rates: Rates
    origin: str
    """Where it is from, as a prediction states it."""
    has_own_host: bool = False
    """Whether the host was calibrated by small steps."""


@contextlib.contextmanager
def using(file: str | Path | None) -> Iterator[None]:
    """Predict with a calibration file of the user; None: with the catalog's, or the one already in use.

    Raises:
        InputError: no calibration that can be used.
    """
    if file is None:
        yield
        return
    path = str(Path(file).absolute())
    _read(path)
    token = _chosen.set(path)
    try:
        yield
    finally:
        _chosen.reset(token)


def chosen_file() -> str | None:
    """Return the user's calibration file in use."""
    return _chosen.get()


def calibrated(gpu: Gpu) -> Calibrated:
    """Return what step times of a GPU are computed with.

    Raises:
        InputError: ``operations_of`` of its row names no calibration of the catalog.
    """
    file = _chosen.get()
    shipped = _shipped(gpu.name, gpu.operations_of, gpu.reference)
    return shipped if file is None else _of_user(file, gpu.name, shipped)


@functools.cache
def _shipped(gpu: str, operations_of: str | None, reference: str) -> Calibrated:
    known = sorted(path.stem for path in (FOLDER / "calibrations").glob("*.json"))
    for field, value in (("operations_of", operations_of), ("reference", reference)):
        if value is not None and value not in known:
            remedy = f"name one of {', '.join(known)}, or leave it out"
            place = names.place(names.GPUS, gpu)
            problem = "no calibration of that GPU is in the catalog"
            raise InputError(problem, remedy, file=place, field=field, value=value)
    name = operations_of or gpu
    return _of_catalog(name if name in known else reference)


@functools.cache
def _of_catalog(gpu: str) -> Calibrated:
    found = _catalog(gpu)
    torch = found.environment.torch
    origin = f"operations timed by calibrate on {gpu} (torch {torch}), host costs fitted to measured steps"
    return Calibrated(gpu, OpTimes(found.ops, gpu), rates(), origin)


@functools.cache
def _catalog(gpu: str) -> Calibration:
    # Without the checks of a user's file, which take longer than to read it.
    return Calibration.model_validate_json((FOLDER / "calibrations" / f"{gpu}.json").read_bytes())


@functools.cache
def _of_user(path: str, gpu: str, shipped: Calibrated) -> Calibrated:
    found = _read(path)
    own_gpu = bool(found.ops) and found.gpu == gpu
    ratio, basis = _host_ratio(found)
    if not own_gpu and ratio is None:
        problem = f"it has neither operations of {gpu} nor enough costs of a host"
        raise InputError(problem, "calibrate on that GPU", field="--calibration", value=path)
    own = f"{Path(path).name}, by calibrate on {found.gpu or found.environment.device}"
    known, origins = shipped.rates, []
    if own_gpu:
        origins.append(f"operations of {own} (torch {found.environment.torch})")
    else:
        origins.append(f"operations timed by calibrate on {shipped.gpu}")
    if ratio is not None:
        known = known.on_host(ratio)
        by = f"by {basis} of {Path(path).name}"
        origins.append(f"a host that takes {ratio:.2f} times as long as the catalog's rates expect, {by}")
    return Calibrated(
        gpu if own_gpu else shipped.gpu, OpTimes(found.ops, gpu) if own_gpu else shipped.times, known,
        "; ".join(origins), has_own_host=len(found.host_steps) >= LEAST_STEPS,
    )  # fmt: skip


def _host_ratio(own: Calibration) -> tuple[float | None, str]:
    """Return how much longer this host takes than the rates expect, and on what basis; None: unknown.

    Whole small steps decide. Where a calibration has none, as without a GPU, its single costs are compared
    with those of the machine of the catalog's calibration, and that machine's small steps with the rates.
    """
    catalog = _catalog(rates().host_of)
    expected = {_key(step): step.expected_s for step in catalog.host_steps if step.expected_s}
    steps = _ratios({_key(step): step.step_s for step in own.host_steps}, expected)
    if len(steps) >= LEAST_STEPS:
        return median(steps), f"{len(steps)} small steps"
    wanted = {name: seconds for name, seconds in catalog.host.items() if not OPTIONAL_COSTS & {*name.split()}}
    costs = _ratios(own.host, wanted)
    if len(costs) < len(wanted):
        return None, ""
    of_catalog = _ratios({_key(step): step.step_s for step in catalog.host_steps}, expected)
    return median(costs) * median(of_catalog), f"{len(costs)} single costs (no small steps: less certain)"


def _key(step: HostStep) -> str:
    return canonical_json(step.recipe)


def _ratios(own: dict[str, float], others: dict[str, float]) -> list[float]:
    return [own[name] / seconds for name, seconds in others.items() if own.get(name)]


@functools.cache
def _read(path: str) -> Calibration:
    try:
        return calibration_of(read_text(Path(path), MAX_FILE_BYTES), path)
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
        remedy = "name a file that trainfit calibrate wrote"
        raise InputError(problem, remedy, field="--calibration", value=path) from None
