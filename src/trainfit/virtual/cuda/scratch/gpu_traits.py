"""GpuTraits: properties of a GPU that determine its kernels' scratch memory. No torch here."""

from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version

from trainfit.spec.errors import InputError
from trainfit.spec.hardware import Gpu

NUM_SMS = {
    "v100-sxm2-32gb": 80, "t4": 40, "a10": 72, "a30": 56, "a40": 84, "rtx-a6000": 84,
    "a100-sxm4-40gb": 108, "a100-sxm4-80gb": 108, "a100-pcie-80gb": 108, "l4": 58, "l40": 142,
    "l40s": 142, "rtx-3090": 82, "rtx-4090": 128, "rtx-5090": 170, "h100-sxm": 132, "h100-pcie": 114,
    "h100-nvl": 132, "h200": 132, "h200-nvl": 132, "h20": 78, "gh200-96gb": 132, "b200": 148,
    "gb200": 152, "b300": 148,
}  # fmt: skip
"""Streaming multiprocessors, from NVIDIA's architecture white papers and data sheets."""
LARGEST_NUM_SMS = {
    (7, 0): 80, (7, 5): 72, (8, 0): 108, (8, 6): 84, (8, 9): 142, (9, 0): 132, (10, 0): 148, (10, 3): 148,
    (12, 0): 170,
}  # fmt: skip
"""For unlisted GPUs: the largest of a capability. Affects only buffers of reductions, under 2 MiB each."""
L2_CACHE_MIB = {
    "v100-sxm2-32gb": 6, "t4": 4, "a10": 6, "a30": 24, "a40": 6, "rtx-a6000": 6, "a100-sxm4-40gb": 40,
    "a100-sxm4-80gb": 40, "a100-pcie-80gb": 40, "l4": 48, "l40": 96, "l40s": 96, "rtx-3090": 6,
    "rtx-4090": 72, "rtx-5090": 96, "h100-sxm": 50, "h100-pcie": 50, "h100-nvl": 50, "h200": 60,
    "h200-nvl": 60, "h20": 60, "gh200-96gb": 60, "b200": 126, "gb200": 126, "b300": 126,
}  # fmt: skip
"""From the same papers; the H200's as its driver reports it (62914560 bytes)."""
LARGEST_L2_CACHE_MIB = 126
"""For unlisted GPUs. Only autotuning of compiled kernels in the first step allocates as much."""
THREADS_PER_SM = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}
"""CUDA C programming guide, technical specifications per compute capability; 2048 where not listed."""
SHARED_MEMORY_KIB = {
    (7, 0): 96, (7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (10, 3): 227,
    (12, 0): 99,
}  # fmt: skip
"""Opt-in shared memory of one block, KiB, from the same table."""


@cache
def installed_torch() -> tuple[int, int]:
    """Return (major, minor) of the installed torch without importing it."""
    major, minor = version("torch").split(".")[:2]
    return int(major), int(minor)


@dataclass(frozen=True)
class GpuTraits:
    """Properties of a CUDA GPU and the PyTorch version that determine scratch memory."""

    compute_capability: tuple[int, int] = (9, 0)
    num_sms: int = 132
    threads_per_sm: int = 2048
    shared_memory_bytes: int = 227 * 1024
    """Opt-in shared memory of one block."""
    torch_version: tuple[int, int] = field(default_factory=installed_torch)
    l2_cache_bytes: int = 60 << 20

    @classmethod
    def of(cls, gpu: Gpu, torch_version: tuple[int, int] | None = None) -> "GpuTraits":
        """Return the traits of a catalog row.

        Raises:
            InputError: not a CUDA GPU, or of an unknown compute capability.
        """
        capability = gpu.compute_capability
        if capability is None or capability not in SHARED_MEMORY_KIB:
            known = ", ".join(f"{major}.{minor}" for major, minor in sorted(SHARED_MEMORY_KIB))
            raise InputError(
                f"the virtual GPU models CUDA's kernels, not {gpu.title}'s",
                f"choose an NVIDIA GPU of compute capability {known}",
                field="hardware.gpu",
                value=gpu.name,
            )
        return cls(
            compute_capability=capability,
            num_sms=NUM_SMS.get(gpu.name, LARGEST_NUM_SMS[capability]),
            threads_per_sm=THREADS_PER_SM.get(capability, 2048),
            shared_memory_bytes=SHARED_MEMORY_KIB[capability] * 1024,
            torch_version=torch_version or installed_torch(),
            l2_cache_bytes=L2_CACHE_MIB.get(gpu.name, LARGEST_L2_CACHE_MIB) << 20,
        )
