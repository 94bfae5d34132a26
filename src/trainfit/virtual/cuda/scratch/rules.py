"""Looks a call up in the rules: scratch bytes and output bytes."""

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

_ROOMS = (attention, indexing, lists, losses, matmul, normalization, reductions, sorting)


def _merged(kind: str) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for room in _ROOMS:
        rules = getattr(room, kind, {})
        if twice := merged.keys() & rules.keys():
            raise ValueError(f"{sorted(twice)} have a rule in two files")
        merged.update(rules)
    return merged


LATER: dict[str, Callable[[Tensor], bool]] = {
    "aten::native_dropout": lambda t: t.dtype != torch.bool,
    "aten::_scaled_dot_product_cudnn_attention": lambda t: t.numel() > 1,
}
"""Operations that do not allocate their results in the order they return them: which come later (Dropout.cu: the mask
first; attention.cu: cuDNN's seed and offset first)."""
_SCRATCH, _OUTPUTS = _merged("SCRATCH"), _merged("OUTPUTS")


def scratch_bytes(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, *, gpu: GpuTraits
) -> tuple[int, ...]:
    """Bytes of each scratch tensor that the CUDA kernel of ``func`` allocates, alive together until it returns.

    Args:
        func: an aten OpOverload as CUDA runs it.
        args, kwargs, out: its arguments and result; fake tensors.
        gpu: on which GPU and PyTorch it would run.
    """
    name = func._schema.name
    rule = _SCRATCH.get(name)
    return () if rule is None else rule(Call(name, args, kwargs, out, gpu))


def as_allocated(func: Any, outputs: list[tuple[int, Tensor]]) -> list[tuple[int, Tensor]]:
    """Results (with their positions) in the order in which the CUDA kernel allocates them."""
    later = LATER.get(func._schema.name)
    return outputs if later is None else sorted(outputs, key=lambda output: later(output[1]))


def output_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> dict[int, int]:
    """Bytes of outputs that are of another size on CUDA than the fake's: position among the output's tensors -> bytes."""
    name = func._schema.name
    rule = _OUTPUTS.get(name)
    return {} if rule is None else rule(Call(name, args, kwargs, out, None))
