"""What a GPU holds besides the allocator's memory: the CUDA context and the libraries' kernels. No torch here.

Measured on an H200 (driver 580, CUDA 13.0, torch 2.11; results/h200-measured.jsonl): nvidia-smi's use less the allocator's
reserved bytes was the same to the byte in every recipe. On other GPUs it is an assumption, said with the estimate.
"""

from trainfit.spec.hardware import Gpu
from trainfit.spec.units import MIB
from trainfit.virtual.ledger import Ledger

CONTEXT_BYTES = 12013 * MIB // 16
"""CUDA context with PyTorch's and cuBLAS's kernels: 750.8125 MiB."""
CUDNN_BYTES = 16 * MIB
"""More, once cuDNN's attention has run."""


def overhead_bytes(gpu: Gpu, ledger: Ledger) -> int:
    """Bytes on the device that no allocator statistic shows; 0 on a CPU."""
    if gpu.vendor == "host":
        return 0
    uses_cudnn = any("cudnn" in op.name for op in ledger.ops)
    return CONTEXT_BYTES + (CUDNN_BYTES if uses_cudnn else 0)


MARGIN = 1 / 512
"""Share of the card that a recipe must leave free to be said to fit. Of 20 recipes drawn within 3 % of an H200's size,
three that were predicted to need 99.83 % to 99.98 % ran out of memory in a later step, as free memory fell into pieces
(results/h200-measured.jsonl, tag near-card)."""


def capacity_bytes(gpu: Gpu, ledger: Ledger) -> int:
    """What the allocator may reserve on this GPU."""
    return int(gpu.usable_bytes * (1 - MARGIN)) - overhead_bytes(gpu, ledger)
