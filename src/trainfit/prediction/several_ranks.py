"""One rank of a recipe's GPUs on the virtual GPU: the rank with the highest peak."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_group

from trainfit.ledger.ledger import ALLOCATE, Ledger
from trainfit.parallel import collectives, expert_parallel
from trainfit.parallel.data_parallel import Bucket
from trainfit.parallel.sharded_optimizer import ShardedOptimizer
from trainfit.spec.recipe import Recipe
from trainfit.spec.units import format_bytes
from trainfit.techniques.parallel.fsdp import not_compared
from trainfit.virtual.cluster.ddp import ddp_on_fakes
from trainfit.virtual.cluster.rank import fake_group, one_rank, rank_observers
from trainfit.virtual.cluster.streams import Order, ordered_collectives
from trainfit.virtual.cuda.scratch import GpuTraits
from trainfit.virtual.gpu import VirtualGpu, virtual_gpu
from trainfit.virtual.trace.exclusive import replaced

LARGEST_SHARDS = "memory is that of rank 0, whose shards are the largest"
EQUAL_RANKS = "memory is the same on every rank"
About = Callable[[Ledger], tuple[str, ...]]
"""Returns assumptions about the ranks that a ledger is not of."""


@contextmanager
def rank_of(recipe: Recipe, traits: GpuTraits | None, *, prefers_cudnn: bool) -> Iterator[VirtualGpu]:
    """Enter the virtual GPU of the rank with the highest peak; collectives act as NCCL's."""
    order = Order()
    with ExitStack() as stack:
        mesh = stack.enter_context(fake_group(recipe.mesh.dimensions))
        observers = (*rank_observers(), order)
        virtual = stack.enter_context(virtual_gpu(traits, prefers_cudnn=prefers_cudnn, observers=observers))
        virtual.mesh = mesh
        stack.enter_context(one_rank(virtual.tracer))
        stack.enter_context(ordered_collectives(order))
        stack.enter_context(replaced(collectives, "can_average", lambda tensor, group: True))
        stack.enter_context(replaced(collectives, "all_reduce", _all_reduce))
        strategy = recipe.mesh.strategy
        if recipe.mesh.shards_weights:
            from trainfit.virtual.cluster.shards import own_chunks  # Imports FSDP2.

            stack.enter_context(own_chunks())
            if recipe.mesh.copy_engines:
                stack.enter_context(_peers(virtual))
            virtual.about_ranks = lambda _: (LARGEST_SHARDS,)
        elif strategy in ("ddp", "zero1"):
            stack.enter_context(ddp_on_fakes(virtual.tracer))
            about = stack.enter_context(fullest_rank()) if strategy == "zero1" else lambda _: (EQUAL_RANKS,)
            virtual.about_ranks = about
        else:
            stack.enter_context(_gradients_in_buckets(virtual))
            virtual.about_ranks = lambda _: (EQUAL_RANKS,)
        lines: list[About] = [virtual.about_ranks, lambda _: not_compared(recipe)]
        if recipe.mesh.expert > 1:
            lines.insert(1, stack.enter_context(balanced_experts(order)))
        virtual.about_ranks = lambda ledger: tuple(line for each in lines for line in each(ledger))
        yield virtual


def _all_reduce(tensors: list[Tensor], op: Any, group: collectives.Group) -> dist.Work | None:
    """Reduce a list by the operator that, unlike ``allreduce_coalesced_``, takes fake tensors."""
    options = dist.AllreduceOptions()
    options.reduceOp, options.asyncOp = op, True
    assert group is not None
    return group.allreduce(tensors, options)


@contextmanager
def _peers(virtual: VirtualGpu) -> Iterator[None]:
    """Let peer memory be outside the allocator, and its copies be the collectives that they stand for."""
    from trainfit.parallel import peer_copies  # Imports FSDP2.

    live, ledger, world = virtual.tracer.live, virtual.tracer.ledger, _get_default_group

    def renamed(name: str, num_parameters: int) -> None:
        one = ledger.collectives[-1]
        ledger.collectives[-1] = one._replace(name=name, num_parameters=num_parameters)

    class VirtualPeers(peer_copies.PeerMemory):
        def __init__(self, num_bytes: int, device: Any):
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            self.others = list(range(1, self.size))
            ledger.peer_bytes += num_bytes

        def moved(self, tensor: Tensor, region: slice) -> Tensor:
            storage = tensor.untyped_storage()
            index = live.index_of_storage(storage)
            assert index is not None
            live.resize(storage, index, 0, "moved")
            return tensor

        def received(self, gradient: Tensor, region: slice) -> Tensor:
            length = (region.stop - region.start) // len(self.others) // gradient.element_size()
            return gradient.flatten()[:length].expand(len(self.others), -1)

        def barrier(self) -> None:
            pass

        def read(self, outputs: list[Tensor], regions: list[slice]) -> None:
            numel = sum(one.numel() for one in outputs) // self.size
            of_one = outputs[0][:1]
            world()._allgather_base(of_one.expand(numel * self.size), of_one.expand(numel))
            renamed("copied_gather", len(outputs))

        def write(self, gradients: list[Tensor], regions: list[slice]) -> None:
            numel = -(-sum(one.numel() for one in gradients) // self.size)
            of_one = gradients[0].flatten()[:1]
            whole, options = of_one.expand(numel * self.size), dist.ReduceScatterOptions()
            world()._reduce_scatter_base(of_one.expand(numel), whole, options)
            renamed("copied_scatter", len(gradients))

    with replaced(peer_copies, "PeerMemory", VirtualPeers):
        yield


@contextmanager
def balanced_experts(order: Order) -> Iterator[About]:
    """Let every rank route its tokens to all experts alike: fake tensors have no routes."""
    pairs: set[int] = set()

    def balanced(sizes_2n: Tensor, num_pairs: int) -> list[list[int]]:
        order.host_waits()
        ranks = sizes_2n.shape[1]
        sent = [(num_pairs + ranks - 1 - rank) // ranks for rank in range(ranks)]
        received = ranks * sent[:1]  # All ranks send as many to this one.
        pairs.add(sum(received))
        return [sent, received]

    def about(ledger: Ledger) -> tuple[str, ...]:
        each = kept_by_a_pair(ledger, max(pairs))
        return (
            f"tokens are routed evenly: a rank computes {max(pairs):,} pairs of a token and an expert in "
            f"each layer; one that receives more needs {each:,} bytes for each more in all layers",
        )

    with replaced(expert_parallel, "read_sizes", balanced):
        yield about


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


@contextmanager
def fullest_rank() -> Iterator[About]:
    """Let each sharded optimizer be that of the rank that owns most bytes of parameters."""
    owned = ShardedOptimizer._owned
    most: list[int] = []
    loads: list[list[int]] = []

    def of_fullest(self: Any, group: dict[str, Any]) -> dict[str, Any]:
        if all(self._bytes_of_rank is not each for each in loads):
            loads.append(self._bytes_of_rank)
            most.append(max(range(self.world_size), key=self._bytes_of_rank.__getitem__))
            self.rank = most[0]  # All optimizers of a step are of one rank.
        return owned(self, group)

    def about(ledger: Ledger) -> tuple[str, ...]:
        held = [sum(each) for each in zip(*loads, strict=True)]
        rank = most[0]
        return (
            f"memory is that of rank {rank}, which updates the most parameters, {format_bytes(held[rank])}; "
            f"the fewest of a rank are {format_bytes(min(held))}",
        )

    with replaced(ShardedOptimizer, "_owned", of_fullest):
        yield about


@contextmanager
def _gradients_in_buckets(virtual: VirtualGpu) -> Iterator[None]:
    """Assign ``DataParallel``'s buffer, of which gradients become views, to gradients."""
    begin = Bucket.begin

    def begun(self: Bucket, *args: Any) -> None:
        begin(self, *args)
        for parameter in self.parameters:
            assert parameter.grad is not None
            virtual.tracer.live.own(parameter.grad, "gradients", virtual.scope_of(parameter))

    with replaced(Bucket, "begin", begun):
        yield
