"""GpuTraits: the facts on which a kernel's choice of scratch memory depends. Imports no torch."""

from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version

from trainfit.spec.errors import InputError
from trainfit.spec.hardware import Gpu

KIB, MIB = 1 << 10, 1 << 20
GFX: dict[str, tuple[tuple[int, int], int, int]] = {
    "gfx90a": ((9, 0), 64 * KIB, 8 * MIB),
    "gfx942": ((9, 4), 64 * KIB, 4 * MIB),
    "gfx950": ((9, 5), 160 * KIB, 4 * MIB),
}
"""AMD's architecture -> the capability that ROCm reports, shared memory a block, L2 cache of one die (LLVM's
AMDGPU user guide; CDNA white papers)."""
THREADS_PER_COMPUTE_UNIT = 2048
ROCM = (
    "AMD GPU: 76 MiB of hipBLASLt's workspace a thread and attention by AOTriton, as in PyTorch's source; "
    "other scratch as on CUDA; nothing measured",
)


@cache
def installed_torch() -> tuple[int, int]:
    """Return (major, minor) of the installed torch, without importing it."""
    major, minor = version("torch").split(".")[:2]
    return int(major), int(minor)


@dataclass(frozen=True)
class GpuTraits:
    """The catalog's columns of a CUDA GPU (``spec.hardware.Cuda``), and the PyTorch that runs on it.

    The defaults are an H200's.
    """

    compute_capability: tuple[int, int] = (9, 0)
    num_sms: int = 132
    threads_per_sm: int = 2048
    shared_memory_bytes: int = 227 * 1024  # The most shared memory that one block may opt in to
    l2_cache_bytes: int = 60 << 20
    torch_version: tuple[int, int] = field(default_factory=installed_torch)
    gfx: str = ""  # AMD's name of the architecture; empty for CUDA

    @classmethod
    def of(cls, gpu: Gpu, torch_version: tuple[int, int] | None = None) -> "GpuTraits":
        """Return the traits of a catalog row.

        Raises:
            InputError: no virtual GPU models it.
        """
        installed = torch_version or installed_torch()
        if gpu.cuda is not None:
            return cls(*gpu.cuda, torch_version=installed)
        if gpu.gfx in GFX and gpu.num_sms is not None:
            capability, shared, l2 = GFX[gpu.gfx]
            traits = (capability, gpu.num_sms, THREADS_PER_COMPUTE_UNIT, shared, l2)
            return cls(*traits, gfx=gpu.gfx, torch_version=installed)
        raise InputError(
            f"no kernels are modelled for {gpu.title}; it is listed for mfu",
            "choose a GPU that trainfit gpus lists as measured or modelled",
            field="hardware.gpu",
            value=gpu.name,
        )

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Return the assumptions behind a ledger of this GPU."""
        return ROCM if self.gfx else ()
