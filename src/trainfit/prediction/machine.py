"""The machine that a step is predicted for: its GPU, with its host and calibration. No torch here.

A prediction looks the GPU up once, by ``machine_of``, and passes the machine on.
"""

from dataclasses import dataclass, replace

from trainfit.catalog.load import gpu as find_gpu
from trainfit.prediction.time.calibrated import Calibrated, OwnCalibration, calibrated
from trainfit.spec.hardware import Gpu
from trainfit.spec.recipe import Hardware


@dataclass(frozen=True, eq=False)
class Machine:
    """A GPU in its host, what the time of a step on it is computed with, and what it costs."""

    row: Gpu
    """As the catalog has it."""
    gpu: Gpu
    """With as many in a host as the recipe says."""
    known: Calibrated
    price_per_hour: float | None
    """US dollars for one GPU, the user's own if given; None: not known."""


def machine_of(hardware: Hardware, calibration: OwnCalibration | None = None) -> Machine:
    """Return the machine that a recipe's ``hardware`` names.

    Args:
        calibration: the user's; None: the catalog's.

    Raises:
        InputError: an unknown GPU, or a calibration that says nothing of it, nor of a host.
    """
    per_host = None if hardware.nodes is None else hardware.count // hardware.nodes
    found = machine_with(find_gpu(hardware.gpu), calibration, gpus_per_host=per_host)
    own = hardware.price_per_hour
    return found if own is None else replace(found, price_per_hour=own)


def machine_with(
    row: Gpu, calibration: OwnCalibration | None = None, *, gpus_per_host: int | None = None
) -> Machine:
    """Return the machine with a GPU.

    Args:
        gpus_per_host: None: as many as the catalog has.
    """
    gpu = row if gpus_per_host is None else row.model_copy(update={"gpus_per_host": gpus_per_host})
    return Machine(row, gpu, calibrated(row, calibration), row.price_per_hour)
