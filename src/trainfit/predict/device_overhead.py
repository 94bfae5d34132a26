"""What a GPU holds besides the allocator's memory: the CUDA context and the libraries' kernels. No torch here."""

from trainfit.spec.hardware import Gpu
from trainfit.spec.units import MIB

CONTEXT_BYTES = 520 * MIB
"""CUDA context with PyTorch's kernels loaded."""


def context_bytes(gpu: Gpu) -> int:
    """Bytes on the device that no allocator statistic shows; 0 on a CPU."""
    return 0 if gpu.name == "cpu" else CONTEXT_BYTES
