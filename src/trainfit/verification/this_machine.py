"""This machine: its GPU, and whether its memory is enough for a predicted step.

The GPU is named by a process of its own: this one must not create a CUDA context.
"""

import json
import subprocess
import sys
from contextlib import suppress

from trainfit.catalog.load import gpu, gpu_of_device
from trainfit.catalog.names import CPU
from trainfit.measurement.environment import runs_on_cuda
from trainfit.measurement.machine import PROCESS_BYTES
from trainfit.measurement.nvml import Nvml
from trainfit.prediction.evaluation import evaluation_peak
from trainfit.rl.estimate.estimate import predict
from trainfit.rl.estimate.names import of_update_alone
from trainfit.spec.errors import InputError
from trainfit.spec.hardware import Gpu
from trainfit.spec.host_memory import available_bytes, host_bytes
from trainfit.spec.objective import Policy
from trainfit.spec.recipe import Recipe
from trainfit.spec.units import format_bytes

PROGRAM = """
import json, torch
print(json.dumps(torch.cuda.get_device_name() if torch.cuda.is_available() else None))
"""
LIMIT_S = 120.0
SURE = 0.25
"""Share of the memory below which a first, rough prediction is enough."""
OTHERWISE = "--force tries anyway"


def device_name() -> str | None:
    """Return the driver's name of this machine's first CUDA GPU; None without one.

    Raises:
        RuntimeError: torch failed.
    """
    command, closed = [sys.executable, "-c", PROGRAM], subprocess.DEVNULL
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, stdin=closed)
    if done.returncode:
        raise RuntimeError(f"torch could not name its GPU: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def gpu_here(name: str | None = None) -> tuple[Gpu, str]:
    """Return the catalog's row of this machine's GPU (or CPU), and the device's own name.

    Args:
        name: the row's name, if the driver's name does not identify it.

    Raises:
        InputError: the catalog has no such GPU; the error lists near names.
    """
    known = device_name()
    if known is None and name not in (None, CPU):
        problem, remedy = "no CUDA GPU in this machine", "leave --gpu out to verify the CPU path"
        raise InputError(problem, remedy, field="gpu", value=name)
    if known is None or name == CPU:
        row = gpu(CPU)
        return row, row.title
    return gpu(name) if name is not None else gpu_of_device(known), known


def check_memory(
    recipe: Recipe, device: str, *, deterministic: bool = False, evaluates: int | None = None
) -> None:
    """Refuse a recipe whose predicted peak this machine's memory does not hold.

    Args:
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:1``.
        deterministic: with kernels that repeat bit by bit.
        evaluates: sequences of a forward of an evaluation, where they may be more than a step's.

    Raises:
        InputError: it says what is needed and what is there.
    """
    if isinstance(recipe.objective, Policy):
        evaluates = None  # Held-out prompts are answered as those of a rollout.
    if runs_on_cuda(device):
        _check_gpu(recipe, int(device.partition(":")[2] or 0), deterministic, evaluates)
    else:
        _check_host(recipe, deterministic, evaluates)


def _check_gpu(recipe: Recipe, index: int, deterministic: bool, evaluates: int | None) -> None:
    nvml = Nvml(index)
    total_bytes, name = nvml.total_bytes(), nvml.name()
    if total_bytes is None or name is None:
        return  # Without NVML a step that is too large ends with an error of PyTorch's, and no harm.
    with suppress(InputError):  # A GPU that the catalog does not have: as the recipe's.
        recipe = _on(recipe, gpu_of_device(name).name)
    there = f"{name} has {format_bytes(total_bytes)}"
    needed_bytes = predict(recipe, deterministic=deterministic).peak_device_bytes
    if needed_bytes > total_bytes:
        raise _refusal(recipe, needed_bytes, there)
    if evaluates is not None and evaluates > recipe.batch.micro:
        needed_bytes = evaluation_peak(recipe, evaluates, deterministic=deterministic).device_bytes
        if needed_bytes > total_bytes:
            raise _evaluation_refusal(needed_bytes, there, evaluates)


def _check_host(recipe: Recipe, deterministic: bool, evaluates: int | None) -> None:
    count = recipe.hardware.count
    if evaluates is not None and evaluates > recipe.batch.micro:
        peak_bytes = evaluation_peak(recipe, evaluates, deterministic=deterministic).allocated_bytes
        needed_bytes = count * (peak_bytes + PROCESS_BYTES)
        if needed_bytes > (free_bytes := available_bytes()):
            there = f"this machine has {format_bytes(free_bytes)} free of {format_bytes(host_bytes())}"
            raise _evaluation_refusal(needed_bytes, there, evaluates)
    free_bytes = available_bytes()
    # The step of the recipe's own GPU is traced anyway, for its FLOPs.
    rough_bytes = count * _peak_bytes(recipe, deterministic)
    if rough_bytes <= SURE * free_bytes:
        return
    peak_bytes = _peak_bytes(_on(recipe, CPU), deterministic) if count == 1 else rough_bytes // count
    needed_bytes = count * (peak_bytes + PROCESS_BYTES)
    if needed_bytes > free_bytes:
        there = f"this machine has {format_bytes(free_bytes)} free of {format_bytes(host_bytes())}"
        raise _refusal(recipe, needed_bytes, there)


def _peak_bytes(recipe: Recipe, deterministic: bool) -> int:
    """Return what a step or a policy's loop holds on a host: no CUDA context, and what it offloads."""
    found = predict(recipe, deterministic=deterministic)
    return found.peak_allocated_bytes + found.host_bytes


def _on(recipe: Recipe, gpu: str) -> Recipe:
    return recipe.model_copy(update={"hardware": recipe.hardware.model_copy(update={"gpu": gpu})})


def _evaluation_refusal(needed_bytes: int, there: str, sequences: int) -> InputError:
    problem = f"an evaluation takes {format_bytes(needed_bytes)} as predicted, and {there}"
    return InputError(problem, f"lower eval_batch; {OTHERWISE}", field="eval_batch", value=sequences)


def _refusal(recipe: Recipe, needed_bytes: int, there: str) -> InputError:
    is_loop = of_update_alone(recipe) is None
    problem = (
        f"the {'loop' if is_loop else 'step'} takes {format_bytes(needed_bytes)} as predicted, and {there}"
    )
    sizes = "batch.micro, objective.rollout.batch" if is_loop else "batch.micro"
    remedy = f"use a smaller model, {sizes} or batch.seq, recompute: full, or an adapter"
    return InputError(problem, f"{remedy}; {OTHERWISE}")
