"""Step time from a ledger: what the GPU cannot be faster than, and what it is expected to need. No torch here.

Each operation takes at least its FLOPs over the peak of its dtype and at least its bytes over the memory's
bandwidth. The expectation divides both by the share of the data sheet that such work sustains (``SUSTAINED``), and a
step is never faster than the host issues its operations (``HOST_S_PER_OP``), unless it is compiled.
"""

from dataclasses import dataclass

from trainfit.spec.hardware import Gpu
from trainfit.spec.result import StepTime
from trainfit.virtual.ledger import Ledger

PEAK_DTYPE = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float64": "fp64",
    "float8_e4m3fn": "fp8",
}
SUSTAINED = {"matmul": 0.72, "attention": 0.33, "memory": 0.85}
"""Shares of the data sheet that an H200 sustains: bf16 products 0.70 to 0.78, causal flash attention 0.31 to 0.33 of
the bf16 peak, a copy 0.89 (measured 2026-11 with torch 2.11, docs/log.md)."""
HOST_S_PER_OP = 9e-6
"""Seconds the host needs to issue one operation eagerly, Python and autograd included."""


@dataclass(frozen=True)
class Roofline:
    """Seconds of one steady step on one GPU."""

    expected: StepTime
    lowest_s: float
    """Every operation at the data sheet's rate, the host infinitely fast: no run is faster."""
    num_ops: int


def roofline(ledger: Ledger, gpu: Gpu) -> Roofline | None:
    """Time of the steady step; None where the GPU's rates are not known."""
    if gpu.memory_bytes_per_s is None or not gpu.peak_flops_per_s:
        return None
    matmul_s = memory_s = lowest_s = 0.0
    num_ops = 0
    for op in ledger.ops:
        if ledger.segments[op.segment].step != "steady":
            continue
        times = ledger.times(op)
        num_ops += times * op.calls
        move_s = op.num_bytes / gpu.memory_bytes_per_s
        compute_s = op.causal_flops / peak_flops_per_s(gpu, PEAK_DTYPE.get(op.dtype, "fp32"))
        lowest_s += times * max(compute_s, move_s)
        kind = "attention" if "attention" in op.name else "matmul"
        if op.causal_flops:
            matmul_s += times * max(compute_s / SUSTAINED[kind], move_s / SUSTAINED["memory"])
        else:
            memory_s += times * move_s / SUSTAINED["memory"]
    host_s = max(0.0, num_ops * HOST_S_PER_OP - matmul_s - memory_s)
    return Roofline(StepTime(matmul_s=matmul_s, memory_s=memory_s, host_s=host_s), lowest_s, num_ops)


def peak_flops_per_s(gpu: Gpu, dtype: str) -> float:
    """Dense peak of a dtype; where the data sheet has none, that of the next wider one it has."""
    wider = {"fp8": ("fp8", "bf16", "fp16", "fp32"), "bf16": ("bf16", "fp32", "fp16"), "fp16": ("fp16", "fp32", "bf16"),
             "fp32": ("fp32", "bf16", "fp16"), "fp64": ("fp64", "fp32")}  # fmt: skip
    peaks: dict[str, float] = {str(name): peak for name, peak in gpu.peak_flops_per_s.items()}
    for name in wider[dtype]:
        if name in peaks:
            return peaks[name]
    raise ValueError(f"{gpu.name}: peak_flops_per_s has no {dtype}: add it to the catalog's row")
