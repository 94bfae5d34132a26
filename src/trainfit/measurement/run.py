"""``measure``: a recipe in, a Measurement out, whatever happens on the way; each in a process of its own."""

import re
import tempfile
from pathlib import Path

from trainfit.measurement.environment import host_environment
from trainfit.measurement.process import Start, run_in, spawned
from trainfit.measurement.trial import TrialRequest
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Environment, Measurement

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
    environment: Environment | None = None,
) -> Measurement:
    """Run the recipe's step on a real device and measure it.

    At least two steps (``warmup``, if that is more) run untimed: the first, and one or more steady ones,
    whose phases' peaks are read. Then ``steps`` steps are timed, and nothing looks at memory while they run.
    0 times none.

    Args:
        device: ``auto`` (CUDA if there is one), ``cpu``, ``cuda`` or ``cuda:1``.
        timeout_s: ends the trial and all its children; what was known by then is in the result.
        memory_limit_bytes: what the steps may allocate, as on a smaller device.
        model_flops, hardware_flops: FLOPs of one step, for MFU and HFU; with ``peak_flops_per_s``, the
        device's peak.
        start: how the process is made (process.py).
        environment: the host's, if known already.

    Raises:
        InputError: the recipe asks for what this machine or this version does not have.
    """
    if not DEVICE.fullmatch(device):
        raise InputError("no such device", "use auto, cpu, cuda or cuda:1", field="device", value=device)
    request = TrialRequest(
        recipe=recipe, steps=steps, warmup=warmup, device=device, memory_limit_bytes=memory_limit_bytes,
        environment=environment or host_environment(device),
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="trainfit-measure-", ignore_cleanup_errors=True) as folder:
        measured = run_in(Path(folder), request, start, timeout_s)
    return with_utilisation(measured, model_flops, hardware_flops, peak_flops_per_s)


def with_utilisation(
    measured: Measurement,
    model_flops: float | None,
    hardware_flops: float | None,
    peak_flops_per_s: float | None,
) -> Measurement:
    """Return ``measured`` with FLOPs, and with MFU and HFU where time and peak are known.

    MFU: model FLOPs per second over the peak; HFU: hardware FLOPs (recomputation included) per second over
    the peak (PaLM, arXiv 2204.02311, appendix B).
    """
    step_s = measured.step_s

    def share(flops: float | None) -> float | None:
        return (
            flops / step_s / peak_flops_per_s if flops is not None and step_s and peak_flops_per_s else None
        )

    known = {"model_flops": model_flops, "hardware_flops": hardware_flops}
    return measured.model_copy(update=known | {"mfu": share(model_flops), "hfu": share(hardware_flops)})
