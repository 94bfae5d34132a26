"""LoRA next to layers that tensor parallel shards: one collective sums base and low-rank product together.

``y = W x + s B A x`` with W [o, i], A [r, i], B [o, r]; A and B of one layer are sharded like this:

- Outputs sharded: B has the rows of W, and A is whole. Each rank multiplies A with its own tokens alone,
  before all tokens are gathered, and gathers r numbers a token. So no rank keeps gathered tokens.
- Inputs sharded: A has the columns of W, and B is whole. Each rank's ``W x + s B A x`` of its inputs is a
  partial sum, which is scattered over the tokens.

A rank's gradient of the whole matrix is a part of a sum: of its tokens, or of its part of ``A x``.
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
    layer.tokens = tokens
    layer.__class__ = _columns_class(type(layer))


def shard_adapted_rows(layer: Any, tokens: TokenShards) -> None:
    """Shard the input features of a layer and of its adapter; their sum is scattered over the tokens."""
    tensor_parallel.shard_rows(layer.base_layer, tokens, is_summed=False)
    for down, up in _products(layer):
        tensor_parallel.shard_rows(down, tokens, is_summed=False)
        tensor_parallel.replicate(up, tokens, is_shared=True)
    layer.tokens = tokens
    layer.__class__ = _rows_class(type(layer))


def _products(layer: Any) -> Iterator[tuple[nn.Linear, nn.Linear]]:
    """Yield A and B of each adapter of the layer."""
    for name, down in layer.lora_A.items():
        yield down, layer.lora_B[name]


@cache
def _columns_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a class that computes as PEFT's ``Linear``, with A's product of this rank's tokens."""

    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.base_layer(x)
        if self.disable_adapters:
            return y
        out, own = y, self.tokens.own
        for name in self.active_adapters:
            down, up = self.lora_A[name], self.lora_B[name]
            low = down(self.lora_dropout[name](own.to(down.weight.dtype)))
            out = out + up(self.tokens.gather(low)) * self.scaling[name]
        return out.to(y.dtype)

    return type(f"Sharded{kind.__name__}", (kind,), {"forward": forward})


@cache
def _rows_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a class whose forward sums PEFT's results over the ranks, and adds the base's bias once."""

    def forward(self: Any, x: Tensor) -> Tensor:
        out = self.tokens.scatter(kind.forward(self, x))
        bias = self.base_layer.bias
        return out if bias is None else out + tensor_parallel.local(bias).to(out.dtype)

    return type(f"Sharded{kind.__name__}", (kind,), {"forward": forward})
