"""``measure``: run a recipe's step in a process of its own, and return a Measurement in every case.

``main`` is that process: it runs the trial itself (trial.py), or launches one process a GPU (ranks.py).
"""

import json
import re
import tempfile
from pathlib import Path

from trainfit.measurement.environment import host_environment
from trainfit.measurement.process import Start, run_in, spawned
from trainfit.measurement.trial_files import REQUEST, TrialRequest, ended_by_storage
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Measurement
from trainfit.spec.value import MOST_COUNT

DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?", re.ASCII)


def measure(
    recipe: Recipe,
    *,
    steps: int = 10,
    warmup: int = 3,
    device: str = "auto",
    timeout_s: float | None = None,
    memory_limit_bytes: int | None = None,
    model_flops: float | None = None,
    hardware_flops: float | None = None,
    peak_flops_per_s: float | None = None,
    start: Start = spawned,
    body: str = "",
) -> Measurement:
    """Run the recipe's step on a real device and measure it.

    At least two steps (``warmup``, if that is more) run untimed: the first, and one or more steady ones,
    whose phases' peaks are read. Then ``steps`` steps are timed, without reading memory. Of steps that take
    over a minute on one GPU the last of the untimed ones is timed, and counts as one of ``steps``.

    Args:
        device: ``auto`` (CUDA if there is one), ``cpu``, ``cuda`` or ``cuda:1``.
        timeout_s: ends the trial and all its children; the result keeps the stages measured by then.
        memory_limit_bytes: bytes that the steps may allocate, to emulate a smaller device.
        model_flops, hardware_flops, peak_flops_per_s: of one step and of the device, for MFU and HFU.
        start: how the process is made (process.py).
        body: what is measured in place of steps (``TrialRequest.body``).

    Raises:
        InputError: the recipe needs what this machine or this version does not have.
    """
    if not DEVICE.fullmatch(device):
        raise InputError("no such device", "use auto, cpu, cuda or cuda:1", field="device", value=device)
    for field, value in (("steps", steps), ("warmup", warmup)):
        if not 0 <= value <= MOST_COUNT:
            raise InputError("not so many steps", f"write 0 to {MOST_COUNT:,}", field=field, value=value)
    request = TrialRequest(
        recipe=recipe, steps=steps, warmup=warmup, device=device, memory_limit_bytes=memory_limit_bytes,
        environment=host_environment(device), body=body,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="trainfit-measure-", ignore_cleanup_errors=True) as folder:
        measured, _ = run_in(Path(folder), request, start, timeout_s)
    return with_utilisation(measured, model_flops, hardware_flops, peak_flops_per_s)


def with_utilisation(
    measured: Measurement,
    model_flops: float | None,
    hardware_flops: float | None,
    peak_flops_per_s: float | None,
) -> Measurement:
    """Return ``measured`` with FLOPs, and with MFU and HFU if time and peak are known.

    HFU includes recomputation (PaLM, arXiv 2204.02311, appendix B).
    """
    possible = (measured.step_s or 0.0) * (peak_flops_per_s or 0.0)
    known = {"model_flops": model_flops, "hardware_flops": hardware_flops}
    shares = {
        name: flops / possible if flops is not None and possible else None
        for name, flops in (("mfu", model_flops), ("hfu", hardware_flops))
    }
    return measured.model_copy(update=known | shares)


def main(folder: Path) -> int:
    """Run the trial of ``folder`` and return the exit code."""
    return ended_by_storage(lambda: _trial(folder))


def _trial(folder: Path) -> int:
    if json.loads((folder / REQUEST).read_text())["recipe"]["hardware"]["count"] > 1:
        from trainfit.measurement.ranks import launch

        return launch(folder)
    from trainfit.measurement.trial import run_trial

    return run_trial(folder)
