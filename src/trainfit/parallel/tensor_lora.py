"""LoRA next to layers that tensor parallel shards: one collective sums base and low-rank product together.

``y = W x + s B A x`` with W [o, i], A [r, i], B [o, r]. Of a layer with sharded outputs B has the rows of W,
and A is whole on every rank; its gradient is a sum over ranks, as each computes the part of its own outputs.
Of a layer with sharded inputs A has the columns of W, and B is whole: each rank's ``W x + s B A x`` of its
inputs is a partial sum. B's gradient is a sum over ranks then, as each has its part of ``A x``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from torch import Tensor, nn

from trainfit.parallel import tensor_parallel
from trainfit.parallel.tensor_parallel import TokenShards


def is_adapted(module: nn.Module) -> bool:
    """Return whether PEFT's LoRA wraps a layer."""
    return hasattr(module, "lora_A") and hasattr(module, "base_layer")


def shard_adapted_columns(layer: Any, tokens: TokenShards, parts: Sequence[int] = ()) -> None:
    """Shard the output features of a layer and of its adapter; ``parts`` as of ``shard_columns``."""
    tensor_parallel.shard_columns(layer.base_layer, tokens, parts)
    for down, up in _products(layer):
        tensor_parallel.replicate(down, tokens, is_shared=True)
        tensor_parallel.shard_columns(up, tokens, parts)


def shard_adapted_rows(layer: Any, tokens: TokenShards) -> None:
    """Shard the input features of a layer and of its adapter; their sum is scattered over the tokens."""
    tensor_parallel.shard_rows(layer.base_layer, tokens, is_summed=False)
    for down, up in _products(layer):
        tensor_parallel.shard_rows(down, tokens, is_summed=False)
        tensor_parallel.replicate(up, tokens, is_shared=True)
    layer.tokens = tokens
    layer.__class__ = _scattering(type(layer))


def _products(layer: Any) -> Iterator[tuple[nn.Linear, nn.Linear]]:
    """Yield A and B of each adapter of the layer."""
    for name, down in layer.lora_A.items():
        yield down, layer.lora_B[name]


@cache
def _scattering(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a class whose forward sums PEFT's results over the ranks, and adds the base's bias once."""

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = self.tokens.scatter(kind.forward(self, x, *args, **kwargs))
        bias = self.base_layer.bias
        return out if bias is None else out + tensor_parallel.local(bias).to(out.dtype)

    return type(f"Sharded{kind.__name__}", (kind,), {"forward": forward})
