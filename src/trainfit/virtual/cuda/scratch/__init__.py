"""Scratch memory that CUDA kernels allocate, and outputs whose size on CUDA differs from a fake CPU tensor's.

The rules follow PyTorch's source, listed in docs/internals/sources.md. An operation without a rule takes no
scratch.
"""

from trainfit.virtual.cuda.scratch.gpu_traits import GpuTraits
from trainfit.virtual.cuda.scratch.libraries import Workspaces
from trainfit.virtual.cuda.scratch.rules import as_allocated, output_bytes, scratch_bytes

__all__ = ["GpuTraits", "Workspaces", "as_allocated", "output_bytes", "scratch_bytes"]
