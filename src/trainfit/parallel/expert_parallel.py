"""Expert parallel: each rank of a group holds a share of every layer's experts, and tokens travel to them.

A rank routes its own tokens. Each pair of a token and a chosen expert is sent by an all-to-all to the rank
with that expert, and its result is sent back (GShard, arXiv:2006.16668). The model's own code computes the
products, of fewer experts. Groups are taken from the ranks that shard the dense weights, as in torchtitan:
expert weights are sharded by FSDP2 over the ranks that are left.

Shapes: t tokens of this rank, k experts a token, p = t * k pairs, r pairs received, h hidden size, e experts,
n ranks of a group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import _disable_current_modes

from trainfit.parallel.cluster import REAL, Cluster
from trainfit.parallel.tensor_parallel import adopt, replace_tensor


class ExpertRanks(NamedTuple):
    """A group of ranks that share experts, and the ranks that hold the same ones."""

    mesh: DeviceMesh
    data_mesh: DeviceMesh | None
    """Replicas and shards of the same experts; None: this rank's experts are on no other rank."""
    cluster: Cluster = REAL

    @classmethod
    def of(cls, mesh: DeviceMesh, num_ranks: int, cluster: Cluster = REAL) -> ExpertRanks:
        """Return groups of ``num_ranks`` neighbours among the ranks of ``mesh["replicate", "shard"]``."""
        replicas, shards = mesh["replicate"].size(), mesh["shard"].size()
        if shards * replicas == num_ranks:
            return cls(mesh["shard"], None, cluster)
        names = ("replicate", "expert_shard", "expert")
        shape = replicas, shards // num_ranks, num_ranks
        with _disable_current_modes():  # A mesh reads its ranks, which fake tensors do not have.
            split = init_device_mesh(mesh.device_type, shape, mesh_dim_names=names)
            # Groups that are there are used again: another one's communicator would take memory.
            expert = mesh["shard"] if shards == num_ranks else split["expert"]
            groups = [one.get_group() for one in (mesh["replicate"], split["expert_shard"], expert)]
            ranks = DeviceMesh.from_group(groups, mesh.device_type, split.mesh, mesh_dim_names=names)
        return cls(ranks["expert"], ranks[names[:2] if replicas > 1 else names[1:2]], cluster)

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group()


class Routes(NamedTuple):
    """How many pairs of a token and an expert this rank exchanges with each rank of the group."""

    sent: list[int]
    """Pairs to each rank."""
    received: list[int]
    """Pairs from each rank."""
    group: dist.ProcessGroup

    def exchange(self, x_ph: Tensor) -> Tensor:
        """Send each rank its pairs, sorted by expert; return those received, [r, h]."""
        out = x_ph.new_empty((sum(self.received), x_ph.shape[1]))
        dist.all_to_all_single(out, x_ph, self.received, self.sent, group=self.group)
        return out

    def back(self, x_rh: Tensor) -> Tensor:
        """Send what was received, or came of it, back to its rank; return [p, h]."""
        out = x_rh.new_empty((sum(self.sent), x_rh.shape[1]))
        dist.all_to_all_single(out, x_rh.contiguous(), self.sent, self.received, group=self.group)
        return out


def shard_experts(module: nn.Module, ranks: ExpertRanks) -> None:
    """Keep this rank's share of stacked experts, and let the forward send tokens to their experts' ranks.

    Args:
        module: of transformers; its parameters are [e, ...], its forward takes hidden states [t, h], the
            chosen experts [t, k] and their weights [t, k]. e is a multiple of the number of ranks.
    """
    for name in module._parameters:
        replace_tensor(module, name, ranks.mesh, Shard(0))
    module.num_experts //= ranks.mesh.size()  # pyright: ignore[reportArgumentType, reportOperatorIssue]
    adopt(module, ranks, forward=_dispatched(type(module)))


def fully_shard_experts(block: nn.Module, options: dict[str, Any]) -> set[nn.Parameter]:
    """Shard the block's experts over the ranks that hold the same ones.

    Args:
        options: of ``fully_shard``.

    Returns:
        The parameters that no other rank has, which FSDP2 must leave alone.
    """
    alone: set[nn.Parameter] = set()
    for experts in expert_modules(block):
        mesh = experts.tokens.data_mesh
        if mesh is None:
            alone |= set(experts.parameters())
            continue
        size = mesh.size(mesh.ndim - 1)
        # Shards of equal size: of whole experts, or of each expert's rows.
        dim = 0 if experts.num_experts % size == 0 else 1
        # The router's weights keep their dtype.
        policy = replace(options["mp_policy"], cast_forward_inputs=False)
        own = {"mesh": mesh, "mp_policy": policy, "shard_placement_fn": lambda _, dim=dim: Shard(dim)}
        fully_shard(experts, **options | own)
    return alone


def prefetch(blocks: list[nn.Module]) -> None:
    """Gather each block's weights and experts while the block before it computes.

    The host waits in each layer for the sizes of its exchange, so it cannot issue gathers ahead of time.
    """
    for one, following in pairwise(blocks):
        _units(one)[0].set_modules_to_forward_prefetch([*_units(one)[1:], *_units(following)])
        _units(following)[0].set_modules_to_backward_prefetch([*_units(following)[1:], *_units(one)])


def _units(block: nn.Module) -> list[Any]:
    """Return the block, and its experts where FSDP2 gathers them."""
    return [block, *(one for one in expert_modules(block) if isinstance(one, FSDPModule))]


def expert_modules(model: nn.Module) -> list[Any]:
    """Return the modules whose experts are shared by ranks."""
    return [one for one in model.modules() if isinstance(getattr(one, "tokens", None), ExpertRanks)]


@cache
def _dispatched(kind: type[nn.Module]) -> Callable[..., Tensor]:
    """Return the forward of a class of experts, with the tokens of all ranks of the group."""
    forward_of_own: Callable[..., Tensor] = kind.forward

    def forward(self: Any, x_th: Tensor, experts_tk: Tensor, weights_tk: Tensor) -> Tensor:
        ranks, num_own, k = self.tokens, self.num_experts, experts_tk.shape[1]
        num_ranks = ranks.mesh.size()
        experts_p, order_p = experts_tk.flatten().sort()
        places_p = torch.arange(order_p.numel(), device=x_th.device)
        places_p = torch.empty_like(order_p).scatter_(0, order_p, places_p)
        bounds = torch.arange(num_ranks * num_own + 1, device=x_th.device)
        counts = torch.searchsorted(experts_p, bounds).diff()
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=ranks.group)
        sizes_2n = torch.stack((counts, arriving)).view(2, num_ranks, num_own).sum(2)
        sent, received = ranks.cluster.read_sizes(sizes_2n, order_p.numel())
        routes = Routes(sent, received, ranks.group)
        x_rh = _Dispatch.apply(x_th, order_p, places_p, routes)
        own = torch.arange(num_own, device=x_th.device).repeat(num_ranks)
        own_r1 = own.repeat_interleave(arriving, output_size=sum(received))[:, None]
        if not own_r1.numel():  # No kernel has to take an empty product, and every weight gets a gradient.
            x_rh, own_r1 = x_rh.new_zeros((1, x_rh.shape[1])) + x_rh.sum(), own_r1.new_zeros((1, 1))
        y_rh: Tensor = forward_of_own(self, x_rh, own_r1, torch.ones_like(own_r1, dtype=x_rh.dtype))
        y_ph = _Combine.apply(y_rh[: sum(received)], order_p, places_p, routes)
        y_tkh = y_ph.unflatten(0, (-1, k))
        return (y_tkh * weights_tk[..., None]).sum(1).to(x_th.dtype)

    return forward


class _Dispatch(torch.autograd.Function):
    """Hidden states [t, h] -> those of the pairs that this rank computes [r, h].

    Args:
        order_p: the pairs by expert.
        places_p: where each pair is in that order.
    """

    @staticmethod
    def forward(ctx: Any, x_th: Tensor, order_p: Tensor, places_p: Tensor, routes: Routes) -> Tensor:
        ctx.save_for_backward(places_p)
        ctx.routes, ctx.k = routes, order_p.numel() // x_th.shape[0]
        return routes.exchange(x_th[order_p // ctx.k])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (places_p,) = ctx.saved_tensors
        gradient_ph = ctx.routes.back(gradients[0])[places_p]
        gradient_th = gradient_ph.unflatten(0, (-1, ctx.k)).sum(1)
        return gradient_th.mul_(ctx.routes.group.size()), None, None, None


class _Combine(torch.autograd.Function):
    """Results of the pairs that this rank computed [r, h] -> those of its own pairs [p, h].

    The gradient of each rank's mean loss is divided by the number of ranks here and multiplied by it in
    ``_Dispatch``: that of the weights in between is of the mean over the group, as FSDP2's of other weights.
    """

    @staticmethod
    def forward(ctx: Any, y_rh: Tensor, order_p: Tensor, places_p: Tensor, routes: Routes) -> Tensor:
        ctx.save_for_backward(order_p)
        ctx.routes = routes
        return routes.back(y_rh)[places_p]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (order_p,) = ctx.saved_tensors
        gradient_rh = ctx.routes.exchange(gradients[0][order_p])
        return gradient_rh.div_(ctx.routes.group.size()), None, None, None
