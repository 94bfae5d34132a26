"""What measured times are held against: a step's FLOPs from the virtual GPU, and the device's dense peak."""

from dataclasses import dataclass
from typing import Literal

from trainfit.spec.hardware import PeakDtype
from trainfit.spec.recipe import Precision, Recipe

MATMUL_DTYPE: dict[Precision, PeakDtype] = {"fp32": "fp32", "bf16": "bf16", "amp-bf16": "bf16", "amp-fp16": "fp16", "fp8": "fp8"}
"""Precision of a recipe -> dtype of its matrix products' inputs."""


@dataclass(frozen=True)
class Counted:
    """FLOPs of one step, counted operation by operation on the virtual GPU."""

    model_flops: float
    hardware_flops: float
    params: int
    trainable_params: int
    base_params: int
    """Without an adapter's own."""
    ops_without_flops: tuple[str, ...]


def counted_flops(recipe: Recipe, attention: Literal["causal", "full"] = "causal") -> Counted:
    """FLOPs of the steady step; ``causal`` leaves masked attention scores out, ``full`` counts them."""
    from trainfit.predict.estimate import ledger_of

    ledger = ledger_of(recipe)
    steady = {index for index, segment in enumerate(ledger.segments) if segment.step == "steady"}
    ops = [op for op in ledger.ops if op.segment in steady]
    causal = attention == "causal"
    adapter = recipe.adapter is not None
    return Counted(
        model_flops=sum(ledger.times(op) * (op.model_flops if causal else op.model_flops_full) for op in ops),
        hardware_flops=sum(ledger.times(op) * (op.causal_flops if causal else op.flops) for op in ops),
        params=ledger.params,
        trainable_params=ledger.trainable_params,
        base_params=ledger.params - ledger.trainable_params if adapter else ledger.params,
        ops_without_flops=ledger.ops_without_flops,
    )


def catalog_peak(recipe: Recipe) -> float | None:
    """The dense peak of the recipe's GPU in the dtype of its matrix products, FLOP/s; None: the catalog has none."""
    from trainfit.catalog.load import gpu

    return gpu(recipe.hardware.gpu).peak_flops_per_s.get(MATMUL_DTYPE[recipe.precision])


def step_flops(recipe: Recipe, device: str, peak_flops: float | None) -> tuple[float, float, float | None]:
    """Model FLOPs and hardware FLOPs of one step, and the dense peak (None: unknown, as for a CPU).

    Args:
        device: ``auto``, ``cpu``, ``cuda``; on CUDA the peak is that of the recipe's ``hardware.gpu``.
        peak_flops: the user's own peak, FLOP/s.
    """
    counted = counted_flops(recipe)
    if peak_flops is None and _on_cuda(device):
        peak_flops = catalog_peak(recipe)
    return counted.model_flops, counted.hardware_flops, peak_flops


def _on_cuda(device: str) -> bool:
    import torch

    return device != "cpu" and torch.cuda.is_available()
