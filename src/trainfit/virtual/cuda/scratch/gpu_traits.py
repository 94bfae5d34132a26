"""GpuTraits: the facts on which a kernel's choice of scratch memory depends. Imports no torch."""

from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version

from trainfit.spec.errors import InputError
from trainfit.spec.hardware import Gpu


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
    shared_memory_bytes: int = 227 * 1024
    """The most shared memory that one block may opt in to."""
    l2_cache_bytes: int = 60 << 20
    torch_version: tuple[int, int] = field(default_factory=installed_torch)

    @classmethod
    def of(cls, gpu: Gpu, torch_version: tuple[int, int] | None = None) -> "GpuTraits":
        """Return the traits of a catalog row.

        Raises:
            InputError: it is no CUDA GPU.
        """
        if gpu.cuda is None:
            raise InputError(
                f"the virtual GPU knows CUDA's kernels, not {gpu.title}'s",
                "choose an NVIDIA GPU",
                field="hardware.gpu",
                value=gpu.name,
            )
        return cls(*gpu.cuda, torch_version=torch_version or installed_torch())
