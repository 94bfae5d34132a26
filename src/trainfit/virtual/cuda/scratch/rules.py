"""Scratch bytes and output bytes of a call, from the rules by operation."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainfit.virtual.cuda.scratch import (
    attention,
    indexing,
    lists,
    losses,
    matmul,
    normalization,
    reductions,
    sorting,
)
from trainfit.virtual.cuda.scratch.call import Call
from trainfit.virtual.cuda.scratch.gpu_traits import GpuTraits

_MODULES = (attention, indexing, lists, losses, matmul, normalization, reductions, sorting)


def _merged(kind: str) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for module in _MODULES:
        rules = getattr(module, kind, {})
        if twice := merged.keys() & rules.keys():
            raise ValueError(f"{sorted(twice)} have a rule in two files")
        merged.update(rules)
    return merged


LATER: dict[str, Callable[[Tensor], bool]] = {
    "aten::native_dropout": lambda t: t.dtype != torch.bool,
    "aten::_scaled_dot_product_cudnn_attention": lambda t: t.numel() > 1,
}
"""Operations that allocate results in another order than they return them -> whether a result is later
(Dropout.cu: the mask first; attention.cu: cuDNN's seed and offset first)."""
_SCRATCH, _OUTPUTS = _merged("SCRATCH"), _merged("OUTPUTS")


def scratch_bytes(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, *, gpu: GpuTraits
) -> tuple[int, ...]:
    """Return the bytes of each scratch tensor that the CUDA kernel allocates, all freed when it returns.

    Args:
        func: an aten OpOverload.
        args, kwargs, out: its arguments and result on fake tensors.
        gpu: the GPU and PyTorch version.
    """
    name = func._schema.name
    rule = _SCRATCH.get(name)
    return () if rule is None else rule(Call(name, args, kwargs, out, gpu))


def as_allocated(func: Any, outputs: list[tuple[int, Tensor]]) -> list[tuple[int, Tensor]]:
    """Return results, with their positions, in the order in which the CUDA kernel allocates them."""
    later = LATER.get(func._schema.name)
    return outputs if later is None else sorted(outputs, key=lambda output: later(output[1]))


def output_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> dict[int, int]:
    """Return the bytes of outputs whose size on CUDA differs, by position among the output's tensors."""
    name = func._schema.name
    rule = _OUTPUTS.get(name)
    return {} if rule is None else rule(Call(name, args, kwargs, out, None))
