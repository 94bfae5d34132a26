"""Recipe -> Estimate: trace its step on the virtual GPU (or read the kept ledger), replay it, sum it up.

The one place that decides whether a recipe is a pipeline of stages. Imports torch only where no ledger is
kept.
"""

from trainfit.catalog.load import gpu as find_gpu
from trainfit.ledger.ledger import Ledger
from trainfit.prediction import cache
from trainfit.prediction.estimate import estimate
from trainfit.prediction.machine import Machine, machine_of
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Estimate


def predict(
    recipe: Recipe, machine: Machine | None = None, *, use_cache: bool = True, deterministic: bool = False
) -> Estimate:
    """Return what one step of the recipe costs on its GPU.

    Several threads may call it; those that trace wait for each other. Random states, default dtype and all
    settings of the process are restored, also after an exception. docs/reference/api.md lists what a thread
    that trains meanwhile may expect, and what is loaded once and stays.

    Args:
        machine: of the recipe's ``hardware``; None: with the catalog's calibration.
        deterministic: with kernels that repeat bit by bit, the default of ``train`` and not of ``measure``.

    Raises:
        InputError: an unknown model or GPU, or techniques that are not there or exclude each other.
    """
    machine = machine or machine_of(recipe.hardware)
    if recipe.mesh.pipeline > 1:
        from trainfit.prediction.pipeline.estimate import estimate_pipeline

        return estimate_pipeline(recipe, machine, use_cache=use_cache, deterministic=deterministic)
    ledger = ledger_of(recipe, machine, use_cache=use_cache, deterministic=deterministic)
    return estimate(recipe, machine, ledger)


def ledger_of(
    recipe: Recipe,
    machine: Machine | None = None,
    *,
    use_cache: bool = True,
    deterministic: bool = False,
    shorten: bool = False,
) -> Ledger:
    """Return the recipe's ledger, from the cache or traced.

    Of a pipeline it is that of the GPU with the highest peak (``stage_ledger.composed``).

    Args:
        machine: of the recipe's ``hardware``; None: with the catalog's calibration.
        shorten: as ``trace`` takes it.
    """
    if recipe.mesh.pipeline > 1:
        from trainfit.prediction.pipeline.estimate import fullest_ledger

        machine = machine or machine_of(recipe.hardware)
        return fullest_ledger(recipe, machine, use_cache=use_cache, deterministic=deterministic)
    gpu = find_gpu(recipe.hardware.gpu) if machine is None else machine.row
    return cache.loaded_or_traced(
        recipe, gpu, use_cache=use_cache, deterministic=deterministic, shorten=shorten
    )
