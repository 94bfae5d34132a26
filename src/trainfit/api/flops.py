"""A step's FLOPs from the virtual GPU and the device's dense peak, for the MFU of measured times."""

from trainfit.catalog.load import gpu as find_gpu
from trainfit.spec.recipe import Parallel, Recipe

COUNTED_ON = "h200"
"""The virtual GPU that counts the steps of accelerators which the virtual GPU does not model."""


def step_flops(
    recipe: Recipe, device: str, peak_flops: float | None, *, deterministic: bool = False
) -> tuple[float, float, float | None]:
    """Return model FLOPs and hardware FLOPs of one step, and the dense peak (None: unknown, as for a CPU).

    Args:
        device: ``auto``, ``cpu``, ``cuda``; on CUDA the peak is that of the recipe's ``hardware.gpu``.
        peak_flops: the user's own peak, FLOP/s.
        deterministic: with kernels that repeat bit by bit, which ``train`` runs by default.

    Raises:
        InputError: the device cannot run the recipe.
    """
    from trainfit.measurement.environment import runs_on_cuda
    from trainfit.prediction.estimate import matmul_dtype
    from trainfit.prediction.predict import ledger_of
    from trainfit.prediction.time.peaks import peak_flops_per_s
    from trainfit.rl.estimate.estimate import ledger_of as loop_ledger
    from trainfit.rl.estimate.names import UPDATE_PHASES, of_update_alone
    from trainfit.rl.estimate.times import part_of
    from trainfit.techniques.registry import check, check_device

    on_cuda = runs_on_cuda(device)
    gpu = find_gpu(recipe.hardware.gpu)
    check(recipe, gpu)
    if recipe.mesh.pipeline > 1:
        check_device(recipe, "cuda" if on_cuda else "cpu")
    check_device(_one_rank(recipe), "cuda" if on_cuda else "cpu")
    if gpu.vendor not in ("nvidia", "host"):  # The FLOPs of a step do not depend on the vendor.
        hardware = recipe.hardware.model_copy(update={"gpu": COUNTED_ON})
        recipe = recipe.model_copy(update={"hardware": hardware})
    if of_update_alone(recipe) is None:  # The ledger that the check of memory reads, too.
        row = find_gpu(recipe.hardware.gpu)
        ledger = part_of(loop_ledger(recipe, row, deterministic=deterministic), UPDATE_PHASES)
    else:
        ledger = ledger_of(recipe, deterministic=deterministic)
    if peak_flops is None and on_cuda and gpu.peak_flops_per_s:
        peak_flops = peak_flops_per_s(gpu, matmul_dtype(ledger))
    return ledger.steady_sum("model_flops"), ledger.steady_sum("causal_flops"), peak_flops


def _one_rank(recipe: Recipe) -> Recipe:
    """Return the recipe on one GPU, as this process is no rank of several."""
    hardware = recipe.hardware.model_copy(update={"count": 1, "nodes": None})
    return recipe.model_copy(update={"hardware": hardware, "parallel": Parallel()})
