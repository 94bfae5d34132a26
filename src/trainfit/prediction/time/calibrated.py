"""What step times are computed with: operations timed on one GPU, the rates of a step. No torch here.

The catalog has those of one H200 and one H100, and of the hosts of measured steps; another GPU takes those of
its reference. A file that ``trainfit calibrate`` wrote replaces the operations for recipes of its GPU, and
rescales the host's costs by the small steps that it measured.
"""

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from trainfit.catalog import names
from trainfit.catalog.load import FOLDER, gpus
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


@dataclass(frozen=True, eq=False)
class OwnCalibration:
    """A calibration file of the user, with its text, which goes to other processes."""

    file: str
    text: str
    content: Calibration

    @property
    def digest(self) -> str:
        """Hash of the file's text."""
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class Calibrated:
    """Operations timed on a GPU and rates of a step."""

    gpu: Gpu
    """The GPU whose operations were timed."""
    times: OpTimes
    rates: Rates
    origin: str
    """Where it is from, as a prediction states it."""
    has_own_host: bool = False
    """Whether the host was calibrated by small steps."""


class RowKey:
    """A GPU's row as part of a cache's key: rows of one name are equal but for their hosts."""

    def __init__(self, gpu: Gpu):
        self.gpu = gpu

    def __hash__(self) -> int:
        return hash(self.gpu.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowKey) and self.gpu.name == other.gpu.name


def own_calibration(file: str | Path | None) -> OwnCalibration | None:
    """Read a calibration file of the user; None: no file.

    Raises:
        InputError: no calibration that can be used.
    """
    if file is None:
        return None
    path = Path(file).absolute()
    try:
        return calibration_from(str(path), read_text(path, MAX_FILE_BYTES))
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
        remedy = "name a file that trainfit calibrate wrote"
        raise InputError(problem, remedy, field="--calibration", value=str(path)) from None


@functools.lru_cache(maxsize=8)
def calibration_from(file: str, text: str) -> OwnCalibration:
    """Return the calibration that a file's text holds; equal texts share one, and the times that it gives.

    Raises:
        InputError: naming the first wrong field of ``file``.
    """
    return OwnCalibration(file, text, calibration_of(text, file))


def calibrated(gpu: Gpu, own: OwnCalibration | None = None) -> Calibrated:
    """Return what step times of a GPU are computed with.

    Args:
        own: the user's calibration; None: the catalog's alone.

    Raises:
        InputError: ``operations_of`` of its row names no calibration of the catalog, or ``own`` says nothing
            of the GPU, nor of a host.
    """
    shipped = _shipped(gpu.name, gpu.operations_of, gpu.reference)
    return shipped if own is None else _of_user(own, RowKey(gpu), shipped)


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
    row = gpus()[gpu]
    return Calibrated(row, OpTimes(found.ops, row), rates(), origin)


@functools.cache
def _catalog(gpu: str) -> Calibration:
    # Without the checks of a user's file, which take longer than to read it.
    return Calibration.model_validate_json((FOLDER / "calibrations" / f"{gpu}.json").read_bytes())


@functools.lru_cache(maxsize=64)
def _of_user(own: OwnCalibration, row: RowKey, shipped: Calibrated) -> Calibrated:
    found, gpu, file = own.content, row.gpu, Path(own.file).name
    own_gpu = bool(found.ops) and found.gpu == gpu.name
    ratio, basis = _host_ratio(found)
    if not own_gpu and ratio is None:
        problem = f"it has neither operations of {gpu.name} nor enough costs of a host"
        raise InputError(problem, "calibrate on that GPU", field="--calibration", value=own.file)
    made = f"{file}, by calibrate on {found.gpu or found.environment.device}"
    known, origins = shipped.rates, []
    if own_gpu:
        origins.append(f"operations of {made} (torch {found.environment.torch})")
    else:
        origins.append(f"operations timed by calibrate on {shipped.gpu.name}")
    if ratio is not None:
        known = known.on_host(ratio)
        origins.append(
            f"a host that takes {ratio:.2f} times as long as the catalog's rates expect, by {basis} of {file}"
        )
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
