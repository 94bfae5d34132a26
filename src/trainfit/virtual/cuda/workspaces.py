"""When CUDA's matrix libraries first take their workspaces, which the caching allocator then holds for good.

cuBLAS keeps one workspace a handle and stream. PyTorch gives each thread its own handle, and autograd runs in a
thread of its own, so a training step has two: the forward's and the backward's.
"""

from typing import Any

from trainfit.virtual.cuda.scratch import (
    GpuTraits,
    cublas_workspace_bytes,
    cublaslt_workspace_bytes,
    uses_cublas,
    uses_cublaslt,
)


class Workspaces:
    """Remembers which thread's library has its workspace already."""

    def __init__(self, gpu: GpuTraits):
        self._gpu = gpu
        self._taken: set[tuple[str, bool]] = set()

    def first_use(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], in_autograd: bool
    ) -> tuple[int, ...]:
        """Bytes that this operation makes the libraries allocate for good, in order.

        Args:
            in_autograd: whether it runs in autograd's thread.
        """
        sizes: list[int] = []
        if uses_cublas(func, args, self._gpu) and self._is_new("cublas", in_autograd):
            sizes.append(cublas_workspace_bytes(self._gpu))
        if uses_cublaslt(func, args, kwargs) and self._is_new("cublaslt", in_autograd):
            sizes.append(cublaslt_workspace_bytes(self._gpu))
        return tuple(size for size in sizes if size)

    def _is_new(self, library: str, in_autograd: bool) -> bool:
        new = (library, in_autograd) not in self._taken
        self._taken.add((library, in_autograd))
        return new
