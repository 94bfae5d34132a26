"""What CUDA kernels allocate inside themselves, and where their outputs differ from a fake CPU tensor's.

Enters: an aten op as CUDA runs it, with fake tensors of the right shapes, dtypes and strides. Leaves: the bytes of
each scratch tensor that the kernel takes from the caching allocator, alive together until it returns; and the bytes
of outputs whose CUDA size is another than the fake's. The rules are PyTorch's own source, read file by file
(docs/internals/sources.md says which); an op without a rule takes no scratch.
"""

from trainfit.virtual.cuda.scratch.gpu_traits import GpuTraits
from trainfit.virtual.cuda.scratch.libraries import (
    cublas_workspace_bytes,
    cublaslt_workspace_bytes,
    uses_cublas,
    uses_cublaslt,
)
from trainfit.virtual.cuda.scratch.rules import as_allocated, output_bytes, temporaries

__all__ = [
    "GpuTraits",
    "as_allocated",
    "cublas_workspace_bytes",
    "cublaslt_workspace_bytes",
    "output_bytes",
    "temporaries",
    "uses_cublas",
    "uses_cublaslt",
]
