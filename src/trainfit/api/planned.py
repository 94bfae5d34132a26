"""Plan a recipe's open fields before a step is built. Torch is imported only if there are some."""

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from trainfit.catalog.config_notes import config_notes
from trainfit.catalog.load import gpu_of_device
from trainfit.report.words import recompute_written
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import RANDOM, Recipe

if TYPE_CHECKING:
    from trainfit.prediction.machine import Machine

UNNAMED_GPU = "this GPU, whose name NVML does not report,"
"""Name of a GPU that no measurement is found for."""


def planned(
    recipe: Recipe,
    device: str | None = None,
    machine: "Machine | None" = None,
    *,
    deterministic: bool = False,
) -> tuple[Recipe, tuple[str, ...]]:
    """Return the recipe with ``recompute: {budget_gib: x}`` and ``attention: best`` planned, and notes.

    Notes: how they were planned, what of the model's config is ignored, and how its weights differ from it.

    Args:
        device: where a real step will run (``auto``, ``cpu``, ``cuda``, ``cuda:1``); None for a prediction.
        machine: of the recipe's ``hardware``; None: with the catalog's calibration.
        deterministic: the step runs with deterministic algorithms, as ``train`` does by default.

    Raises:
        InputError: no plan is within the budget, or ``model.weights`` do not fit the model.
    """
    notes = config_notes(recipe)
    if recipe.model.weights != RANDOM:
        from trainfit.models.weights.check import check_weights

        notes += check_weights(recipe, fetch=device is not None)
    if not recipe.has_open_fields:
        return recipe, notes
    from trainfit.prediction.machine import machine_of

    machine = machine or machine_of(recipe.hardware)
    if recipe.attention == "best":
        from trainfit.planning.attention import choose

        place = {} if device is None else _place(device)
        recipe, note = choose(recipe, machine, deterministic=deterministic, **place)
        notes += (note,)
    from trainfit.planning.recompute import resolve

    built = resolve(recipe, machine)
    if built.recompute != recipe.recompute:
        words = [recompute_written(one.recompute) for one in (recipe, built)]
        notes += (f"recompute: {words[0]} is planned as {words[1]}",)
    return built, notes


def _place(device: str) -> dict[str, Any]:
    """Return the device's type and the GPU's name: the catalog's, else the driver's, else UNNAMED_GPU.

    Raises:
        InputError: no such device.
    """
    from trainfit.measurement.environment import runs_on_cuda
    from trainfit.measurement.nvml import Nvml
    from trainfit.measurement.run import DEVICE

    if not DEVICE.fullmatch(device):
        raise InputError("no such device", "use auto, cpu, cuda or cuda:1", field="device", value=device)
    if not runs_on_cuda(device):
        return {"device_type": "cpu"}
    name = Nvml(int(device.partition(":")[2] or 0)).name() or UNNAMED_GPU
    with suppress(
        InputError
    ):  # The GPU is not in the catalog: the note states that nothing is measured on it.
        name = gpu_of_device(name).name
    return {"gpu": name, "device_type": "cuda"}
