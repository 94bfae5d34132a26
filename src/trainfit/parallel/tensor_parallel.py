"""Tensor parallel: weights are sharded DTensors, and computation is on plain local tensors.

Between attention and feed-forward parts each rank holds a share of the tokens (sequence parallel,
arXiv:2205.05198). A part gathers all tokens, computes its share of heads or columns, and reduce-scatters its
partial sums over the tokens. Logits are sharded over the vocabulary (``loss_parallel``).

Shapes: b batch, s sequence, t = b * s tokens, n ranks, e hidden size, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from trainfit.parallel.collectives import all_gather, reduce_scatter

Forward = Callable[..., Any]


@dataclass
class TokenShards:
    """The ranks that share the tokens, and the shape of the micro-batch that they share."""

    mesh: DeviceMesh
    batch_shape: tuple[int, int] = (0, 0)
    """(b, s)"""
    own: Tensor | None = None
    """This rank's tokens of what the running part has gathered, [1, t / n, e]."""

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group()

    def split(self, x_bse: Tensor) -> Tensor:
        """Return this rank's tokens of the hidden states that every rank has, [1, t / n, e]."""
        b, s, e = x_bse.shape
        self.batch_shape = b, s
        return _Split.apply(x_bse.reshape(b * s, e), self.group)[None]  # pyright: ignore

    def gather(self, x_1te: Tensor) -> Tensor:
        """Return all tokens, [b, s, e], for computation whose results differ by rank."""
        return gathered(x_1te[0], self.group).view(*self.batch_shape, -1)

    def scatter(self, x_bse: Tensor) -> Tensor:
        """Return this rank's tokens of the sum over ranks, [1, t / n, e]."""
        return _Scatter.apply(x_bse.reshape(-1, x_bse.shape[-1]), self.group)[None]  # pyright: ignore

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over ranks in place; every rank computes the same from it."""
        return _Sum.apply(x, self.group)  # pyright: ignore[reportReturnType]


def shard_columns(module: nn.Linear, tokens: TokenShards, parts: Sequence[int] = ()) -> None:
    """Shard the output features; of fused projections, sizes ``parts``, each rank gets a share of each."""
    for name in _names(module):
        replace_tensor(module, name, tokens.mesh, Shard(0), parts)
    module.fused_parts = tuple(parts)  # pyright: ignore[reportArgumentType]
    adopt(module, tokens)


def shard_rows(module: nn.Linear, tokens: TokenShards, *, is_summed: bool = True) -> None:
    """Shard the input features; the result is summed over ranks and scattered over the tokens.

    Args:
        is_summed: False returns this rank's part of the sum, to which the caller adds the bias.
    """
    for name in _names(module):
        is_matrix = getattr(module, name).ndim > 1
        replace_tensor(module, name, tokens.mesh, Shard(1) if is_matrix else Replicate())
    if is_summed:
        adopt(module, tokens, ("bias",), _summed_forward(type(module)))
    else:
        adopt(module, tokens, forward=_partial_forward(type(module)))


def shard_embedding(module: nn.Embedding, tokens: TokenShards) -> None:
    """Shard the vocabulary; every rank gets the hidden states of all tokens."""
    replace_tensor(module, "weight", tokens.mesh, Shard(0))
    adopt(module, tokens, forward=_embedding_forward)


def shard_head(module: nn.Linear, tokens: TokenShards) -> None:
    """Shard the vocabulary; logits are DTensors [b, s, v] of all tokens, sharded alike."""
    replace_tensor(module, "weight", tokens.mesh, Shard(0))
    adopt(module, tokens, forward=_head_forward)


def replicate(module: nn.Module, tokens: TokenShards, *, is_shared: bool) -> None:
    """Keep the parameters whole; with ``is_shared`` each rank's gradient is its part of a sum."""
    names = _names(module)
    for name in names:
        replace_tensor(module, name, tokens.mesh, Replicate())
    adopt(module, tokens, names if is_shared else ())


def gather_input(module: nn.Module, tokens: TokenShards) -> None:
    """Gather the tokens of the module's hidden states before its forward; ``tokens.own`` has its own."""

    def gathered(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own = args[0] if args else kwargs["hidden_states"]
        tokens.own = own
        if args:
            return (tokens.gather(own), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": tokens.gather(own)}

    def forget(*_: Any) -> None:
        tokens.own = None

    module.register_forward_pre_hook(gathered, with_kwargs=True)
    module.register_forward_hook(forget)


def split_input(module: nn.Module, tokens: TokenShards) -> None:
    """Split the tokens of the module's first argument before its forward."""

    def split(_: nn.Module, args: tuple[Any, ...]) -> Any:
        return (tokens.split(args[0]), *args[1:])

    module.register_forward_pre_hook(split)


@cache
def _partial_forward(kind: type[nn.Module]) -> Forward:
    """Return a forward without the bias, of which every rank would add one."""

    def forward(self: Any, x: Tensor) -> Tensor:
        self._parameters["bias"] = None  # Of the local tensors, which are for this call alone.
        return kind.forward(self, x)

    return forward


@cache
def _summed_forward(kind: type[nn.Module]) -> Forward:
    partial = _partial_forward(kind)

    def forward(self: Any, x: Tensor) -> Tensor:
        bias = self._parameters.get("bias")
        out = self.tokens.scatter(partial(self, x))
        return out if bias is None else out + bias

    return forward


def _embedding_forward(self: Any, ids_bs: Tensor) -> Tensor:
    weight = self.weight
    start = self.tokens.mesh.get_local_rank() * weight.shape[0]
    local = ids_bs - start
    outside = (local < 0).bitwise_or_(local >= weight.shape[0])
    padding = None if self.padding_idx is None else self.padding_idx - start
    is_own = padding is not None and 0 <= padding < weight.shape[0]
    hidden = F.embedding(local.masked_fill_(outside, 0), weight, padding if is_own else None)
    return self.tokens.sum(hidden.masked_fill_(outside[..., None], 0))


def _head_forward(self: Any, x_1te: Tensor) -> Tensor:
    logits = F.linear(self.tokens.gather(x_1te), self.weight)
    return DTensor.from_local(logits, self.tokens.mesh, [Shard(logits.ndim - 1)], run_check=False)


def local(tensor: Any) -> Any:
    """Return this rank's part of a DTensor; another value itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of a module's own parameters, and of its buffers: the codes of a quantised weight."""
    own = (*module._parameters.items(), *module._buffers.items())
    return tuple(name for name, tensor in own if tensor is not None)


def replace_tensor(
    module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement, parts: Sequence[int] = ()
) -> None:
    """Replace a parameter or buffer by a DTensor of this rank's share; it is equal on all ranks before."""
    own: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
    whole = own[name]
    if isinstance(whole, DTensor):
        return
    with torch.no_grad():
        own_share = share(whole.detach(), mesh, placement, parts)
    sharded = DTensor.from_local(own_share, mesh, [placement], run_check=False)
    if own is module._parameters:
        own[name] = nn.Parameter(sharded, requires_grad=whole.requires_grad)
    else:
        own[name] = sharded


def share(whole: Tensor, mesh: DeviceMesh, placement: Placement, parts: Sequence[int] = ()) -> Tensor:
    """Return this rank's share of a whole tensor; ``parts`` as of ``shard_columns``."""
    if not isinstance(placement, Shard):
        return whole
    rank, size = mesh.get_local_rank(), mesh.size()
    pieces = whole.split(list(parts)) if parts else (whole,)
    mine = [piece.chunk(size, placement.dim)[rank] for piece in pieces]
    return torch.cat(mine) if parts else mine[0].clone(memory_format=torch.contiguous_format)


def fused_parts(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the sizes of the parts of each fused projection's tensors, by their names."""
    return {
        f"{path}.{name}": module.fused_parts  # pyright: ignore[reportReturnType]
        for path, module in model.named_modules()
        if getattr(module, "fused_parts", ())
        for name in _names(module)
    }


def in_order(in_ranks_order: Tensor, size: int, parts: Sequence[int]) -> Tensor:
    """Return the rows of a fused projection in the model's order, of those of all ``size`` ranks joined."""
    shares = [one.split([part // size for part in parts]) for one in in_ranks_order.chunk(size)]
    return torch.cat([piece for pieces in zip(*shares, strict=True) for piece in pieces])


def adopt(
    module: nn.Module, tokens: object, summed: tuple[str, ...] = (), forward: Forward | None = None
) -> None:
    """Let the module's code see local tensors; gradients of ``summed`` are summed over the ranks.

    Args:
        tokens: the ranks, as the module's ``tokens`` for ``forward``.
    """
    module.__class__ = _local_class(type(module), summed, forward or type(module).forward)
    module.tokens = tokens  # pyright: ignore[reportArgumentType]


@cache
def _local_class(kind: type[nn.Module], summed: tuple[str, ...], forward: Forward) -> type[nn.Module]:
    """Return one class for all modules of a kind, so that they share compiled code."""

    def on_local(self: Any, *args: Any) -> Any:
        parameters, buffers = self._parameters, self._buffers
        self._parameters = {
            name: None
            if one is None
            else one.to_local(grad_placements=[Partial()] if name in summed else None)
            for name, one in parameters.items()
        }
        if buffers:
            self._buffers = {name: local(one) for name, one in buffers.items()}
        try:
            return forward(self, *args)
        finally:
            self._parameters = parameters
            self._buffers = buffers

    return type(f"Sharded{kind.__name__}", (kind,), {"forward": on_local})


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the parts of all ranks, joined along the first dimension; gradients are summed over ranks."""
    return _Gather.apply(x, group)  # pyright: ignore[reportReturnType]


def _all_gather(x_te: Tensor, group: dist.ProcessGroup) -> Tensor:
    if torch.compiler.is_compiling():
        # Dynamo of torch 2.11 takes the gradient of the collective that fills a tensor for zero.
        return functional.all_gather_tensor(x_te, 0, group)
    out = x_te.new_empty((group.size() * x_te.shape[0], *x_te.shape[1:]))
    all_gather(out, x_te.contiguous(), group)
    return out


def _reduce_scatter(x_te: Tensor, group: dist.ProcessGroup) -> Tensor:
    if torch.compiler.is_compiling():
        return functional.reduce_scatter_tensor(x_te, "sum", 0, group)
    out = x_te.new_empty((x_te.shape[0] // group.size(), *x_te.shape[1:]))
    reduce_scatter(out, x_te.contiguous(), group)
    return out


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_te: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather(x_te, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _reduce_scatter(gradients[0], ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_te: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _reduce_scatter(x_te, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _all_gather(gradients[0], ctx.group), None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_te: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x_te.chunk(group.size())[group.rank()].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _all_gather(gradients[0], ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None
