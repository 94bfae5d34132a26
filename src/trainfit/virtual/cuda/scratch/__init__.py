"""Scratch memory that CUDA kernels allocate, and outputs whose size on CUDA differs from a fake CPU tensor's.

The rules follow PyTorch's source (docs/internals/sources.md); each module names its files and registers its
own. An operation without a rule takes no scratch.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainfit.virtual.cuda.scratch import (
    attention,
    indexing,
    losses_and_sorts,
    matmul,
    normalization,
    reductions,
)
from trainfit.virtual.cuda.scratch.call import COPIES, OUTPUTS, SCRATCH, Call
from trainfit.virtual.cuda.scratch.gpu_traits import GpuTraits

__all__ = ["RULES", "GpuTraits", "as_allocated", "copied_bytes", "output_bytes", "scratch_bytes"]
RULES = (attention, indexing, losses_and_sorts, matmul, normalization, reductions)
LATER: dict[str, Callable[[Tensor], bool]] = {
    "aten::native_dropout": lambda t: t.dtype != torch.bool,
    "aten::_scaled_dot_product_cudnn_attention": lambda t: t.numel() > 1,
}
"""Operations that allocate results in another order than they return them -> whether a result is later
(Dropout.cu: the mask first; attention.cu: cuDNN's seed and offset first)."""


def copied_bytes(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, gpu: GpuTraits
) -> tuple[int, ...]:
    """Return the bytes of each copy that a kernel makes of its inputs before it allocates its results."""
    rule = COPIES.get(func._schema.name)
    return () if rule is None else rule(Call(func._schema.name, args, kwargs, None, gpu))


def scratch_bytes(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, *, gpu: GpuTraits
) -> tuple[int, ...]:
    """Return the bytes of each tensor that a kernel allocates after its results, for itself.

    These and the copies are freed when it returns, the last first.
    """
    rule = SCRATCH.get(func._schema.name)
    return () if rule is None else rule(Call(func._schema.name, args, kwargs, out, gpu))


def as_allocated(func: Any, outputs: list[tuple[int, Tensor]]) -> list[tuple[int, Tensor]]:
    """Return results, with their positions, in the order in which the CUDA kernel allocates them."""
    later = LATER.get(func._schema.name)
    return outputs if later is None else sorted(outputs, key=lambda output: later(output[1]))


def output_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> dict[int, int]:
    """Return the bytes of outputs whose size on CUDA differs, by position among the output's tensors."""
    rule = OUTPUTS.get(func._schema.name)
    return {} if rule is None else rule(Call(func._schema.name, args, kwargs, out, None))
