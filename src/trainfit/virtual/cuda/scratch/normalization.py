"""Scratch of layer, RMS and batch norm: copies and partial gradients; statistics in fp32.

Sources: aten/src/ATen/native/cuda/layer_norm_kernel.cu, Normalization.cu.
"""

from math import prod

from torch import Tensor

from trainfit.virtual.cuda.scratch.call import (
    OUTPUTS,
    SCRATCH,
    Call,
    accumulate_size,
    ceil_div,
    copy_if_strided,
)

MANY_ROWS = 64 * 1024
ROWS_PER_BLOCK = 32
COLUMNS_PER_BLOCK = 32
MAX_BLOCKS = 64 * 1024 // 2


@SCRATCH.rule("native_layer_norm", "_fused_rms_norm")
def layer_norm(call: Call) -> tuple[int, ...]:
    """Copies of strided input, weight and bias (``expect_contiguous``)."""
    return copy_if_strided(*(t for t in call.args if isinstance(t, Tensor)))


@SCRATCH.rule("native_layer_norm_backward")
def layer_norm_backward(call: Call) -> tuple[int, ...]:
    """Copies of strided dY and input; partial sums of dgamma and dbeta for very many rows."""
    grad, x, shape, weight, mask = call.args[0], call.args[1], call.args[2], call.args[5], call.args[7]
    wanted = sum(bool(m) for m in mask[1:]) if weight is not None else 0
    return copy_if_strided(grad, x) + partial_gradients(call, x, shape, weight, wanted)


@SCRATCH.rule("_fused_rms_norm_backward")
def rms_norm_backward(call: Call) -> tuple[int, ...]:
    """Scratch as layer norm's, without dbeta."""
    grad, x, shape, weight, mask = call.args[0], call.args[1], call.args[2], call.args[4], call.args[5]
    wanted = 1 if weight is not None and mask[1] else 0
    return copy_if_strided(grad, x) + partial_gradients(call, x, shape, weight, wanted)


def partial_gradients(
    call: Call, x: Tensor, shape: list[int], weight: Tensor | None, wanted: int
) -> tuple[int, ...]:
    """Per-block sums [blocks, N] (``LaunchGammaBetaBackwardCUDAKernel``) of over 65,536 rows, few columns."""
    columns = prod(shape)
    rows = x.numel() // columns if columns else 0
    is_wide = columns // COLUMNS_PER_BLOCK >= call.gpu.num_sms // 2
    if not wanted or weight is None or rows <= MANY_ROWS or is_wide:
        return ()
    blocks = min(MAX_BLOCKS // ceil_div(columns, COLUMNS_PER_BLOCK), ceil_div(rows, ROWS_PER_BLOCK))
    return (blocks * columns * weight.element_size(),) * wanted


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
