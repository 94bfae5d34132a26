"""One rank of a recipe's GPUs on the virtual GPU: the rank with the highest peak."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_group

from trainfit.ledger.ledger import ALLOCATE, Ledger
from trainfit.parallel.cluster import Cluster
from trainfit.parallel.collectives import Group
from trainfit.parallel.peer_memory import PeerMemory
from trainfit.spec.recipe import Recipe
from trainfit.spec.units import format_bytes
from trainfit.techniques.parallel.fsdp import not_compared
from trainfit.virtual.cluster.ddp import ddp_on_fakes
from trainfit.virtual.cluster.rank import fake_group, one_rank, rank_observers
from trainfit.virtual.cluster.streams import Order, ordered_collectives
from trainfit.virtual.cuda.scratch import GpuTraits
from trainfit.virtual.gpu import VirtualGpu, virtual_gpu
from trainfit.virtual.trace.storages import LiveStorages

LARGEST_SHARDS = "memory is that of rank 0, whose shards are the largest"
EQUAL_RANKS = "memory is the same on every rank"


class VirtualRanks(NamedTuple):
    """The ranks of a recipe, of which one runs, and what stands for the others."""

    mesh: DeviceMesh
    cluster: VirtualCluster


@contextmanager
def rank_of(
    recipe: Recipe, traits: GpuTraits | None, *, prefers_cudnn: bool
) -> Iterator[tuple[VirtualGpu, VirtualRanks]]:
    """Enter the virtual GPU of the rank with the highest peak; collectives act as NCCL's."""
    order = Order()
    observers = (*rank_observers(), order)
    with ExitStack() as stack:
        enter = stack.enter_context
        mesh = enter(fake_group(recipe.mesh.dimensions))
        virtual = enter(virtual_gpu(traits, prefers_cudnn=prefers_cudnn, observers=observers))
        enter(one_rank(virtual.tracer))
        enter(ordered_collectives(order))
        if recipe.mesh.shards_weights:
            from trainfit.virtual.cluster.shards import own_chunks  # Imports FSDP2.

            enter(own_chunks())
        elif recipe.mesh.strategy in ("ddp", "zero1"):
            enter(ddp_on_fakes(virtual.tracer))
        yield virtual, VirtualRanks(mesh, VirtualCluster(recipe, virtual, order))


class VirtualCluster(Cluster):
    """The other ranks, which act as the virtual one does."""

    def __init__(self, recipe: Recipe, virtual: VirtualGpu, order: Order):
        self._recipe, self._virtual = recipe, virtual
        self._experts, self._fullest = BalancedExperts(order.host_waits), FullestRank()

    def peer_memory(self, num_bytes: int, device: torch.device) -> PeerMemory:
        return VirtualPeers(num_bytes, self._virtual.tracer.live)

    def read_sizes(self, sizes_2n: Tensor, num_pairs: int) -> list[list[int]]:
        return self._experts.read_sizes(sizes_2n.shape[1], num_pairs)

    def optimizer_rank(self, group: Group, bytes_of_rank: list[int]) -> int:
        return self._fullest.choose(group, bytes_of_rank)

    def averages(self, parameters: list[nn.Parameter]) -> None:
        """Assign the buffer of which gradients became views to gradients."""
        for parameter in parameters:
            assert parameter.grad is not None
            self._virtual.tracer.live.own(parameter.grad, "gradients", self._virtual.scope_of(parameter))

    def about(self, ledger: Ledger) -> tuple[str, ...]:
        """Return how other ranks differ from that of the ledger."""
        mesh = self._recipe.mesh
        if mesh.shards_weights:
            lines = [LARGEST_SHARDS]
        else:
            lines = [self._fullest.about() if mesh.strategy == "zero1" else EQUAL_RANKS]
        if mesh.expert > 1:
            lines.append(self._experts.about(ledger))
        return (*lines, *not_compared(self._recipe))


class VirtualPeers(PeerMemory):
    """Peer memory, which is outside the allocator, whose copies are recorded as collectives."""

    def __init__(self, num_bytes: int, live: LiveStorages):
        self._live = live
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.others = list(range(1, self.size))
        live.ledger.peer_bytes += num_bytes

    def moved(self, tensor: Tensor, region: slice) -> Tensor:
        storage = tensor.untyped_storage()
        index = self._live.index_of_storage(storage)
        assert index is not None
        self._live.resize(storage, index, 0, "moved")
        return tensor

    def received(self, gradient: Tensor, region: slice) -> Tensor:
        length = (region.stop - region.start) // len(self.others) // gradient.element_size()
        return gradient.flatten()[:length].expand(len(self.others), -1)

    def barrier(self) -> None:
        pass

    def read(self, outputs: list[Tensor], regions: list[slice]) -> None:
        numel = sum(one.numel() for one in outputs) // self.size
        of_one = outputs[0][:1]
        _get_default_group()._allgather_base(of_one.expand(numel * self.size), of_one.expand(numel))
        self._rename("copied_gather", len(outputs))

    def write(self, gradients: list[Tensor], regions: list[slice]) -> None:
        numel = -(-sum(one.numel() for one in gradients) // self.size)
        of_one = gradients[0].flatten()[:1]
        whole, options = of_one.expand(numel * self.size), dist.ReduceScatterOptions()
        _get_default_group()._reduce_scatter_base(of_one.expand(numel), whole, options)
        self._rename("copied_scatter", len(gradients))

    def _rename(self, name: str, num_parameters: int) -> None:
        collectives = self._live.ledger.collectives
        collectives[-1] = collectives[-1]._replace(name=name, num_parameters=num_parameters)


class BalancedExperts:
    """Routes of tokens where every rank sends as many to each expert: fake tensors have no routes.

    Args:
        host_waits: called where the host waits for the sizes of an exchange.
    """

    def __init__(self, host_waits: Callable[[], None]):
        self._host_waits = host_waits
        self._pairs: set[int] = set()

    def read_sizes(self, num_ranks: int, num_pairs: int) -> list[list[int]]:
        """Return the pairs to and from each rank, ``num_pairs`` of them sent."""
        self._host_waits()
        sent = [(num_pairs + num_ranks - 1 - rank) // num_ranks for rank in range(num_ranks)]
        received = num_ranks * sent[:1]  # All ranks send as many to this one.
        self._pairs.add(sum(received))
        return [sent, received]

    def about(self, ledger: Ledger) -> str:
        """Return the assumption, and the bytes that one pair more takes."""
        most = max(self._pairs)
        each = kept_by_a_pair(ledger, most)
        return (
            f"tokens are routed evenly: a rank computes {most:,} pairs of a token and an expert in "
            f"each layer; one that receives more needs {each:,} bytes for each more in all layers"
        )


def kept_by_a_pair(ledger: Ledger, num_pairs: int) -> int:
    """Return the bytes of one received pair of each layer, at the moment when they are most.

    They are what is allocated from the exchange that brings a layer's pairs to that which sends results back.
    """
    exchanges = [one for one in ledger.collectives if one.name == "all_to_all"]
    forward = [
        (one.op, after.op)
        for sizes, one, after in zip(exchanges, exchanges[1:], exchanges[2:], strict=False)
        if sizes.num_bytes < min(one.num_bytes, after.num_bytes)
    ]
    ops = {op for begin, end in forward for op in range(begin, end)}
    ofs = {index for index, storage in enumerate(ledger.storages) if storage.op in ops}
    live = most = 0
    for event in ledger.expand():
        if event.storage in ofs:
            live += event.num_bytes if event.kind == ALLOCATE else -event.num_bytes
            most = max(most, live)
    return round(most / num_pairs)


class FullestRank:
    """The rank that owns most bytes of a sharded optimizer's parameters; all optimizers are of one rank."""

    def __init__(self) -> None:
        self._rank: int | None = None
        self._loads: list[list[int]] = []
        """Of each optimizer: the bytes that each rank owns."""

    def choose(self, group: Group, bytes_of_rank: list[int]) -> int:
        """Return the rank, which the first optimizer decides."""
        self._loads.append(bytes_of_rank)
        if self._rank is None:
            self._rank = max(range(len(bytes_of_rank)), key=bytes_of_rank.__getitem__)
        return self._rank

    def about(self) -> str:
        """Return which rank it is, and the most and fewest bytes of a rank."""
        assert self._rank is not None
        held = [sum(each) for each in zip(*self._loads, strict=True)]
        return (
            f"memory is that of rank {self._rank}, which updates the most parameters, "
            f"{format_bytes(held[self._rank])}; the fewest of a rank are {format_bytes(min(held))}"
        )
