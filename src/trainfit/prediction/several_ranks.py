"""One rank of a recipe's GPUs on the virtual GPU: the rank with the highest peak."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from trainfit.ledger.ledger import Ledger
from trainfit.parallel import collectives
from trainfit.parallel.data_parallel import Bucket
from trainfit.parallel.sharded_optimizer import ShardedOptimizer
from trainfit.spec.recipe import Recipe
from trainfit.spec.units import format_bytes
from trainfit.techniques.parallel.fsdp import not_compared
from trainfit.virtual.cluster.ddp import ddp_on_fakes
from trainfit.virtual.cluster.rank import fake_group, one_rank
from trainfit.virtual.cluster.streams import ordered_collectives
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
    with ExitStack() as stack:
        mesh = stack.enter_context(fake_group(recipe.mesh.dimensions))
        virtual = stack.enter_context(virtual_gpu(traits, prefers_cudnn=prefers_cudnn))
        virtual.mesh = mesh
        stack.enter_context(one_rank(virtual.tracer))
        stack.enter_context(ordered_collectives(virtual.tracer))
        stack.enter_context(replaced(collectives, "can_average", lambda tensor, group: True))
        stack.enter_context(replaced(collectives, "all_reduce", _all_reduce))
        strategy = recipe.mesh.strategy
        if recipe.mesh.shards_weights:
            from trainfit.virtual.cluster.shards import own_chunks  # Imports FSDP2.

            stack.enter_context(own_chunks())
            virtual.about_ranks = lambda _: (LARGEST_SHARDS,)
        elif strategy in ("ddp", "zero1"):
            stack.enter_context(ddp_on_fakes(virtual.tracer))
            about = stack.enter_context(fullest_rank()) if strategy == "zero1" else lambda _: (EQUAL_RANKS,)
            virtual.about_ranks = about
        else:
            stack.enter_context(_gradients_in_buckets(virtual))
            virtual.about_ranks = lambda _: (EQUAL_RANKS,)
        about_ranks = virtual.about_ranks
        virtual.about_ranks = lambda ledger: (*about_ranks(ledger), *not_compared(recipe))
        yield virtual


def _all_reduce(tensors: list[Tensor], op: Any, group: collectives.Group) -> dist.Work | None:
    """Reduce a list by the operator that, unlike ``allreduce_coalesced_``, takes fake tensors."""
    options = dist.AllreduceOptions()
    options.reduceOp, options.asyncOp = op, True
    assert group is not None
    return group.allreduce(tensors, options)


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
