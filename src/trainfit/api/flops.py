"""References for measured times: a step's FLOPs from the virtual GPU, and the device's dense peak."""

from dataclasses import dataclass
from typing import Literal

from trainfit.spec.hardware import Gpu
from trainfit.spec.recipe import Recipe

COUNTED_ON = "h200"
"""The virtual GPU on which steps of accelerators that it does not know are counted."""


@dataclass(frozen=True)
class Counted:
    """FLOPs of one step, counted operation by operation on the virtual GPU."""

    model_flops: float
    """FLOPs the mathematics needs."""
    hardware_flops: float
    """FLOPs executed."""
    forward_flops: float
    """FLOPs executed in the forward."""
    params: int
    trainable_params: int
    base_params: int
    """Without an adapter's own."""
    dtype: str
    """Of most matrix products, as the catalog names it."""
    ops_without_flops: tuple[str, ...]


def counted_flops(
    recipe: Recipe, attention: Literal["causal", "full"] = "causal", *, deterministic: bool = False
) -> Counted:
    """FLOPs of the steady step; ``causal`` leaves masked attention scores out, ``full`` counts them.

    ``deterministic``: with kernels that repeat bit by bit, which ``train`` runs by default.
    """
    from trainfit.prediction.estimate import ledger_of, matmul_dtype

    ledger = ledger_of(recipe, deterministic=deterministic)
    causal = attention == "causal"
    model = hardware = forward = 0.0
    for op in ledger.ops:
        segment = ledger.segments[op.segment]
        if segment.step != "steady":
            continue
        executed = ledger.times(op) * (op.causal_flops if causal else op.flops)
        model += ledger.times(op) * (op.model_flops if causal else op.model_flops_full)
        hardware += executed
        forward += executed if segment.phase == "forward" else 0.0
    adapters = ledger.trainable_params if recipe.adapter is not None else 0
    return Counted(
        model_flops=model,
        hardware_flops=hardware,
        forward_flops=forward,
        params=ledger.params,
        trainable_params=ledger.trainable_params,
        base_params=ledger.params - adapters,
        dtype=matmul_dtype(ledger),
        ops_without_flops=ledger.ops_without_flops,
    )


def dense_peak(gpu: Gpu, dtype: str) -> float | None:
    """The dense peak of a GPU in ``dtype``, FLOP/s; None: the catalog knows none, as for a CPU."""
    from trainfit.prediction.roofline import peak_flops_per_s

    return peak_flops_per_s(gpu, dtype) if gpu.peak_flops_per_s else None


def step_flops(
    recipe: Recipe, device: str, peak_flops: float | None, *, deterministic: bool = False
) -> tuple[float, float, float | None]:
    """Model FLOPs and hardware FLOPs of one step, and the dense peak (None: unknown, as for a CPU).

    Refuses a recipe that the device cannot run, before anything is counted.

    Args:
        device: ``auto``, ``cpu``, ``cuda``; on CUDA the peak is that of the recipe's ``hardware.gpu``.
        peak_flops: the user's own peak, FLOP/s.
        deterministic: as ``counted_flops`` takes it.
    """
    from trainfit.catalog.load import gpu
    from trainfit.measurement.environment import runs_on_cuda
    from trainfit.techniques.registry import check, check_device

    on_cuda = runs_on_cuda(device)
    check(recipe)
    check_device(recipe, "cuda" if on_cuda else "cpu")
    vendor = gpu(recipe.hardware.gpu).vendor
    counted = counted_flops(
        recipe if vendor in ("nvidia", "host") else _on_virtual_gpu(recipe), deterministic=deterministic
    )
    if peak_flops is None and on_cuda:
        peak_flops = dense_peak(gpu(recipe.hardware.gpu), counted.dtype)
    return counted.model_flops, counted.hardware_flops, peak_flops


def _on_virtual_gpu(recipe: Recipe) -> Recipe:
    """The same step on a GPU that can be traced: what it computes does not depend on the maker."""
    return recipe.model_copy(update={"hardware": recipe.hardware.model_copy(update={"gpu": COUNTED_ON})})
