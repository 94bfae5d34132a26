"""Dense peaks of data sheets by dtype. No torch here."""

from trainfit.spec.hardware import Gpu

PEAK_DTYPE = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "tf32": "tf32",
    "float64": "fp64",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "int8": "int8",
}
"""The peak of a catalog's row that a dtype of torch has."""
WIDER = {
    "int8": ("int8", "fp8", "bf16", "fp16", "fp32"),
    "fp8": ("fp8", "bf16", "fp16", "fp32"), "bf16": ("bf16", "fp32", "fp16"),
    "fp16": ("fp16", "fp32", "bf16"), "tf32": ("tf32", "fp32", "bf16", "fp16"),
    "fp32": ("fp32", "bf16", "fp16"), "fp64": ("fp64", "fp32"),
}  # fmt: skip
"""Peaks of the data sheet that stand for one that it does not have, the next wider dtype first."""


def peak_flops_per_s(gpu: Gpu, dtype: str) -> float:
    """Return the dense peak of a dtype; where the data sheet has none, that of the next wider one it has."""
    peaks: dict[str, float] = {str(name): peak for name, peak in gpu.peak_flops_per_s.items()}
    for name in WIDER[dtype]:
        if name in peaks:
            return peaks[name]
    raise ValueError(f"{gpu.name}: peak_flops_per_s has no {dtype}: add it to the catalog's row")
