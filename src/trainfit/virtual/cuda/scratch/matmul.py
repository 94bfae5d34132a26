"""Scratch of matrix products: operands that cuBLAS cannot take as they lie are copied first.

Sources: aten/src/ATen/native/cuda/Blas.cpp, ``prepare_matrix_for_cublas`` and ``prepare_batch_matrix_for_cublas``;
GroupMM.cu for experts' products.
"""

import torch
from torch import Tensor

from trainfit.virtual.cuda.scratch.call import Call, Registry, num_bytes, round_up
from trainfit.virtual.cuda.scratch.gpu_traits import GpuTraits

SCRATCH: Registry[tuple[int, ...]] = Registry()


@SCRATCH.rule("mm", "_int_mm")
def product(call: Call) -> tuple[int, ...]:
    """mm(a, b): each operand whose layout has no leading dimension is cloned."""
    return tuple(num_bytes(t) for t in (call.args[1], call.args[0]) if needs_copy(t))


@SCRATCH.rule("addmm", "_addmm_activation")
def added_product(call: Call) -> tuple[int, ...]:
    """addmm(self, a, b): as mm; self goes into the epilogue or into the output, no scratch."""
    return tuple(num_bytes(t) for t in (call.args[2], call.args[1]) if needs_copy(t))


@SCRATCH.rule("bmm")
def batched_product(call: Call) -> tuple[int, ...]:
    """bmm(a, b): each operand of which neither matrix dimension has stride 1 is cloned."""
    return tuple(num_bytes(t) for t in (call.args[1], call.args[0]) if needs_batch_copy(t))


@SCRATCH.rule("baddbmm")
def added_batched_product(call: Call) -> tuple[int, ...]:
    """baddbmm(self, a, b): as bmm."""
    return tuple(num_bytes(t) for t in (call.args[2], call.args[1]) if needs_batch_copy(t))


TENSOR_MAP = 128
"""Bytes of a tensor map of Hopper's copy engine (``cute::TmaDescriptor``)."""


@SCRATCH.rule("_grouped_mm")
def grouped_product(call: Call) -> tuple[int, ...]:
    """_grouped_mm in bf16 on Hopper: pointers, strides and shapes of every group, and CUTLASS's workspace.

    The workspace holds tensor maps for each SM: of both operands, the accumulator and each epilogue warp group's
    output (sm90_mma_array_tma_gmma_ws_warpspecialized.hpp, sm90_epilogue_array_tma_warpspecialized.hpp; that small
    problems' ping-pong kernel has two such groups and the other one is from memory). Blackwell's is not known here.
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
    """Whether grouped products run as one CUTLASS kernel; else cuBLAS multiplies group by group (GroupedBlas.cpp)."""
    return a.dtype == b.dtype == torch.bfloat16 and gpu.compute_capability in ((9, 0), (10, 0), (10, 3))


def needs_copy(t: Tensor) -> bool:
    """Whether cuBLAS cannot take this matrix: neither dense nor with rows or columns of stride 1 that do not overlap."""
    rows, columns = t.shape
    row_stride, column_stride = t.stride()
    dense = (column_stride == 1 or columns == 1) and (row_stride == columns or rows == 1)
    dense = dense or ((row_stride == 1 or rows == 1) and (column_stride == rows or columns == 1))
    by_column = row_stride == 1 and column_stride >= max(1, rows)
    by_row = column_stride == 1 and row_stride >= max(1, columns)
    return not (dense or by_column or by_row)


def needs_batch_copy(t: Tensor) -> bool:
    """The same for a batch [b, m, n]; a batch stride of 0 (expanded) is taken as it is."""
    _, rows, columns = t.shape
    _, row_stride, column_stride = t.stride()
    by_column = row_stride == 1 and column_stride >= max(1, rows)
    by_row = column_stride == 1 and row_stride >= max(1, columns)
    return not (by_column or by_row or (t.is_contiguous() and row_stride != 0 and column_stride != 0))
