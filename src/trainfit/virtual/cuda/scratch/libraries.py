"""Workspaces of cuBLAS and cuBLASLt, allocated once per thread and kept.

One per cuBLAS handle and stream, from the caching allocator at the handle's first use (aten/src/ATen/cuda/
CublasHandlePool.cpp): the main thread's (forward, optimizer) and autograd's (backward, recomputation).
"""

from typing import Any

import torch
from torch import Tensor

from trainfit.virtual.cuda.scratch.gpu_traits import GpuTraits
from trainfit.virtual.cuda.scratch.matmul import is_grouped_kernel

MIB = 1 << 20
_CUBLAS = frozenset(
    "aten::" + name
    for name in """
    mm addmm bmm baddbmm addbmm mv addmv dot vdot addr _addmm_activation _scaled_mm _scaled_mm_v2 _int_mm
    """.split()
)
_LT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def cublas_workspace_bytes(gpu: GpuTraits) -> int:
    """Return 32 MiB on Hopper (from torch 2.12 on Blackwell) and for deterministic algorithms, else 8.1 MiB.

    Source: ``parseChosenWorkspaceSize`` in CublasHandlePool.cpp; Blackwell: PyTorch pull request 175344.
    """
    major = gpu.compute_capability[0]
    large = gpu.compute_capability == (9, 0) or (gpu.torch_version >= (2, 12) and major in (9, 10, 12))
    large = large or torch.are_deterministic_algorithms_enabled()
    return 4096 * 8 * 1024 if large else 4096 * 1024 * 2 + 16 * 1024 * 8


def cublaslt_workspace_bytes(gpu: GpuTraits) -> int:
    """Return the bytes that cuBLASLt adds: 1 MiB up to torch 2.11, then 0 (PyTorch pull request 175879)."""
    return MIB if gpu.torch_version < (2, 12) else 0


HIPBLASLT_WORKSPACE_BYTES = 76 * MIB
"""``parseCUDABlasLtWorkspaceSize`` in CublasHandlePool.cpp. AMD's Instinct GPUs multiply by hipBLASLt by
default (``blasPreferredBackend`` in Context.cpp), so hipBLAS's own workspace is not taken."""


def uses_cublas(func: Any, args: tuple[Any, ...], gpu: GpuTraits) -> bool:
    """Return whether an operation uses cuBLAS: not CUTLASS's grouped kernel, nor an empty product."""
    name = func._schema.name
    if name == "aten::_grouped_mm":
        return not is_grouped_kernel(args[0], args[1], gpu)
    return name in _CUBLAS and not any(isinstance(a, Tensor) and a.numel() == 0 for a in args)


def uses_cublaslt(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> bool:
    """Return whether an operation uses cuBLASLt (Blas.cpp): a bias in the epilogue, scaled products."""
    name = func._schema.name
    if name in ("aten::_scaled_mm", "aten::_scaled_mm_v2", "aten::_int_mm"):
        return True
    if name not in ("aten::addmm", "aten::_addmm_activation"):
        return False
    # A contiguous 1-D bias is added in the epilogue; no operand is a vector.
    bias, first, second = args[:3]
    return (
        (kwargs or {}).get("beta", 1) == 1
        and bias.dim() == 1
        and bias.shape[0] == second.shape[1]
        and bias.is_contiguous()
        and bias.dtype in _LT_DTYPES
        and min(*first.shape, *second.shape) > 1
    )


class Workspaces:
    """Track which thread has allocated which library's workspace, on which stream.

    Attributes:
        stream: number of the stream that operations run on.
    """

    def __init__(self, gpu: GpuTraits):
        self._gpu = gpu
        self.stream = 0
        self._taken: set[tuple[str, bool, int]] = set()

    def first_use(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], in_autograd: bool
    ) -> tuple[int, ...]:
        """Return the bytes of the workspaces that this operation is the first to use in its thread."""
        if self._gpu.gfx:
            return self._new(
                {"hipblaslt": uses_cublas(func, args, self._gpu) and HIPBLASLT_WORKSPACE_BYTES}, in_autograd
            )
        used = {
            "cublas": uses_cublas(func, args, self._gpu) and cublas_workspace_bytes(self._gpu),
            "cublaslt": uses_cublaslt(func, args, kwargs) and cublaslt_workspace_bytes(self._gpu),
        }
        return self._new(used, in_autograd)

    def _new(self, used: dict[str, int], in_autograd: bool) -> tuple[int, ...]:
        where = in_autograd, self.stream
        new = {name: size for name, size in used.items() if size and (name, *where) not in self._taken}
        self._taken.update((name, *where) for name in new)
        return tuple(new.values())
