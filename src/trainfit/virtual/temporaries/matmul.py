"""Scratch of matrix products: operands that cuBLAS cannot take as they lie are copied first.

Source: aten/src/ATen/native/cuda/Blas.cpp, ``prepare_matrix_for_cublas`` and ``prepare_batch_matrix_for_cublas``.
"""

from torch import Tensor

from trainfit.virtual.temporaries.call import Call, Registry, num_bytes

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
