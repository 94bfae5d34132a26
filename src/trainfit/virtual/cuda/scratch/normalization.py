"""Scratch of layer, RMS and batch norm: copies and partial gradients; statistics in fp32.

Sources: aten/src/ATen/native/cuda/layer_norm_kernel.cu, Normalization.cu.
"""

from math import prod

from torch import Tensor

from trainfit.virtual.cuda.scratch.call import (
    COPIES,
    OUTPUTS,
    SCRATCH,
    Call,
    accumulate_size,
    ceil_div,
    copy_if_strided,
)
from trainfit.virtual.cuda.scratch.reductions import Dim, global_buffers, sum_vector

MANY_ROWS = 64 * 1024
ROWS_PER_BLOCK = 32
COLUMNS_PER_BLOCK = 32
MAX_BLOCKS = 64 * 1024 // 2


@COPIES.rule("native_layer_norm", "_fused_rms_norm")
def copies_of_forward(call: Call) -> tuple[int, ...]:
    """Copies of strided input, weight and bias (``expect_contiguous``)."""
    return copy_if_strided(*(t for t in call.args if isinstance(t, Tensor)))


@COPIES.rule("native_layer_norm_backward", "_fused_rms_norm_backward")
def copies_of_backward(call: Call) -> tuple[int, ...]:
    """Copies of strided dY and input."""
    return copy_if_strided(*call.args[:2])


@SCRATCH.rule("native_layer_norm_backward")
def layer_norm_backward(call: Call) -> tuple[int, ...]:
    """Partial sums of dgamma and dbeta for very many rows."""
    weight, mask = call.args[5], call.args[7]
    return partial_gradients(call, weight, sum(bool(m) for m in mask[1:]))


@SCRATCH.rule("_fused_rms_norm_backward")
def rms_norm_backward(call: Call) -> tuple[int, ...]:
    """Scratch as layer norm's, without dbeta."""
    weight, mask = call.args[4], call.args[5]
    return partial_gradients(call, weight, int(mask[1]))


def partial_gradients(call: Call, weight: Tensor | None, wanted: int) -> tuple[int, ...]:
    """Sums of each block [blocks, N] of over 65,536 rows, few columns, and what adds them up.

    Their sum is a new tensor, which replaces the gradient (``LaunchGammaBetaBackwardCUDAKernel``).

    Args:
        wanted: gradients of gamma and beta that are computed.
    """
    x, columns = call.args[1], prod(call.args[2])
    rows = x.numel() // columns if columns else 0
    is_wide = columns // COLUMNS_PER_BLOCK >= call.gpu.num_sms // 2
    if not wanted or weight is None or rows <= MANY_ROWS or is_wide:
        return ()
    blocks = min(MAX_BLOCKS // ceil_div(columns, COLUMNS_PER_BLOCK), ceil_div(rows, ROWS_PER_BLOCK))
    item = weight.element_size()
    dims = [Dim(blocks, columns, 0), Dim(columns, 1, 1)]
    sum_of_blocks = global_buffers(dims, item, accumulate_size(weight.dtype), sum_vector(item), call.gpu)
    return (blocks * columns * item,) * wanted + (columns * item,) * wanted + sum_of_blocks


@OUTPUTS.rule("native_layer_norm")
def layer_norm_statistics(call: Call) -> dict[int, int]:
    """Mean and rstd, one per row, in ``toAccumulateType``: fp32 for 16-bit inputs."""
    x, shape = call.args[0], call.args[1]
    size = x.numel() // max(1, prod(shape)) * accumulate_size(x.dtype)
    return {1: size, 2: size}


@OUTPUTS.rule("native_batch_norm", "cudnn_batch_norm")
def batch_norm_statistics(call: Call) -> dict[int, int]:
    """Mean and 1/std, one per channel, in the accumulation type (cuDNN: the weight's, fp32)."""
    x = call.args[0]
    size = x.shape[1] * accumulate_size(x.dtype)
    return {1: size, 2: size}


@OUTPUTS.rule("_fused_rms_norm")
def rms_norm_statistics(call: Call) -> dict[int, int]:
    """Rstd, one per row, in ``toAccumulateType``."""
    x, shape = call.args[0], call.args[1]
    return {1: x.numel() // max(1, prod(shape)) * accumulate_size(x.dtype)}
