"""Scratch of matrix products: copies of operands whose layout cuBLAS does not support.

Sources: aten/src/ATen/native/cuda/Blas.cpp, ``prepare_matrix_for_cublas`` and
``prepare_batch_matrix_for_cublas``; GroupMM.cu for grouped products.
"""

import torch
from torch import Tensor

from trainfit.virtual.cuda.scratch.call import SCRATCH, Call, num_bytes, round_up
from trainfit.virtual.cuda.scratch.gpu_traits import GpuTraits


@SCRATCH.rule("mm", "_int_mm", "addmm", "_addmm_activation")
def product(call: Call) -> tuple[int, ...]:
    """Clones of operands without a leading dimension; an added matrix takes none."""
    first, second = call.args[1:3] if "addmm" in call.name else call.args[:2]
    return tuple(num_bytes(t) for t in (second, first) if needs_copy(t))


@SCRATCH.rule("bmm", "baddbmm")
def batched_product(call: Call) -> tuple[int, ...]:
    """Clones of operands of which neither matrix dimension has stride 1."""
    first, second = call.args[1:3] if call.name == "aten::baddbmm" else call.args[:2]
    return tuple(num_bytes(t) for t in (second, first) if needs_batch_copy(t))


TENSOR_MAP = 128  # Bytes of a TMA descriptor (cute::TmaDescriptor)


@SCRATCH.rule("_grouped_mm")
def grouped_product(call: Call) -> tuple[int, ...]:
    """Pointers, strides and shapes of every group in bf16, and CUTLASS's workspace.

    On Hopper that has TMA descriptors per SM of both operands, the accumulator and each epilogue warp group's
    output (sm90_mma_array_tma_gmma_ws_warpspecialized.hpp, sm90_epilogue_array_tma_warpspecialized.hpp); the
    ping-pong kernel for small problems is assumed to have two such groups. Blackwell's workspace is unknown.
    """
    a, b = call.args[0], call.args[1]
    if not is_grouped_kernel(a, b, call.gpu):
        return ()
    groups = b.shape[0] if b.dim() == 3 else a.shape[0] if a.dim() == 3 else call.arg(2, "offs").shape[0]
    arguments = round_up(groups, 2) * 3 * 8 + groups * 3 * 4 + groups * 3 * 8
    if call.gpu.compute_capability[0] != 9:
        return (arguments,)
    rows = a.shape[-2] // groups if a.dim() == 2 and b.dim() == 3 else a.shape[-2]
    columns = b.shape[-1] // groups if b.dim() == 2 and a.dim() == 3 else b.shape[-1]
    maps = 5 if rows <= 128 or columns <= 128 else 4
    return arguments, maps * TENSOR_MAP * call.gpu.num_sms


def is_grouped_kernel(a: Tensor, b: Tensor, gpu: GpuTraits) -> bool:
    """Return whether a grouped product is one CUTLASS kernel, not cuBLAS per group (GroupedBlas.cpp)."""
    if gpu.gfx:
        return False
    return a.dtype == b.dtype == torch.bfloat16 and gpu.compute_capability in ((9, 0), (10, 0), (10, 3))


def needs_copy(t: Tensor) -> bool:
    """Return whether cuBLAS does not support the layout: not dense, and no stride of 1 without overlap."""
    rows, columns = t.shape
    row_stride, column_stride = t.stride()
    dense = (column_stride == 1 or columns == 1) and (row_stride == columns or rows == 1)
    dense = dense or ((row_stride == 1 or rows == 1) and (column_stride == rows or columns == 1))
    by_column = row_stride == 1 and column_stride >= max(1, rows)
    by_row = column_stride == 1 and row_stride >= max(1, columns)
    return not (dense or by_column or by_row)


def needs_batch_copy(t: Tensor) -> bool:
    """Return the same for a batch [b, m, n], whose batch stride may be 0 (expanded)."""
    _, rows, columns = t.shape
    _, row_stride, column_stride = t.stride()
    by_column = row_stride == 1 and column_stride >= max(1, rows)
    by_row = column_stride == 1 and row_stride >= max(1, columns)
    return not (by_column or by_row or (t.is_contiguous() and row_stride != 0 and column_stride != 0))
