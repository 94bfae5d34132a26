"""Check a prediction against this machine before a real step: is there as much memory as it takes?"""

from contextlib import suppress

from trainfit.catalog.load import gpu_of_device
from trainfit.catalog.names import CPU
from trainfit.measurement.environment import host_bytes, runs_on_cuda
from trainfit.measurement.machine import PROCESS_BYTES, available_bytes
from trainfit.measurement.nvml import Nvml
from trainfit.prediction.predict import predict
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe
from trainfit.spec.units import format_bytes

SURE = 0.25
"""Share of the memory below which a first, rough prediction is enough."""
OTHERWISE = "--force tries anyway"


def check_memory(recipe: Recipe, device: str, *, deterministic: bool = False) -> None:
    """Refuse a recipe whose predicted peak this machine's memory does not hold.

    Args:
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:1``.
        deterministic: with kernels that repeat bit by bit.

    Raises:
        InputError: it says what is needed and what is there.
    """
    if runs_on_cuda(device):
        _check_gpu(recipe, int(device.partition(":")[2] or 0), deterministic)
    else:
        _check_host(recipe, deterministic)


def _check_gpu(recipe: Recipe, index: int, deterministic: bool) -> None:
    nvml = Nvml(index)
    total_bytes, name = nvml.total_bytes(), nvml.name()
    if total_bytes is None or name is None:
        return  # Without NVML a step that is too large ends with an error of PyTorch's, and no harm.
    with suppress(InputError):  # A GPU that the catalog does not have: as the recipe's.
        recipe = _on(recipe, gpu_of_device(name).name)
    needed_bytes = predict(recipe, deterministic=deterministic).peak_device_bytes
    if needed_bytes > total_bytes:
        raise _refusal(needed_bytes, f"{name} has {format_bytes(total_bytes)}")


def _check_host(recipe: Recipe, deterministic: bool) -> None:
    count = recipe.hardware.count
    free_bytes = available_bytes()
    # The step of the recipe's own GPU is traced anyway, for its FLOPs.
    rough_bytes = count * _peak_bytes(recipe, deterministic)
    if rough_bytes <= SURE * free_bytes:
        return
    peak_bytes = _peak_bytes(_on(recipe, CPU), deterministic) if count == 1 else rough_bytes // count
    needed_bytes = count * (peak_bytes + PROCESS_BYTES)
    if needed_bytes > free_bytes:
        there = f"this machine has {format_bytes(free_bytes)} free of {format_bytes(host_bytes())}"
        raise _refusal(needed_bytes, there)


def _peak_bytes(recipe: Recipe, deterministic: bool) -> int:
    """Return what a step holds on a host: no context of CUDA, and what it would offload too."""
    found = predict(recipe, deterministic=deterministic)
    return found.peak_allocated_bytes + found.host_bytes


def _on(recipe: Recipe, gpu: str) -> Recipe:
    return recipe.model_copy(update={"hardware": recipe.hardware.model_copy(update={"gpu": gpu})})


def _refusal(needed_bytes: int, there: str) -> InputError:
    problem = f"the step takes {format_bytes(needed_bytes)} as predicted, and {there}"
    remedy = "use a smaller model, batch.micro or batch.seq, recompute: full, or an adapter"
    return InputError(problem, f"{remedy}; {OTHERWISE}")
