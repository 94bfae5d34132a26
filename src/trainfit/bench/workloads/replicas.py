"""One rank's training step under data parallel, with a sharded optimizer, or with FSDP2."""

import gc
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from trainfit.bench.harness.processes import Rank
from trainfit.bench.harness.profiling import run_in_phases
from trainfit.models.layers import decoder_blocks
from trainfit.parallel import DataParallel, ShardedOptimizer
from trainfit.spec.recipe import Recipe
from trainfit.step import Batch, Step, assemble

Sharding = Literal["none", "ours", "torch"]
"""How the optimizer's state is sharded: ``ShardedOptimizer`` or ``ZeroRedundancyOptimizer``."""
DDP = "DDP"  # torch's DistributedDataParallel, among the strategies of DataParallel
NUM_WARMUP = 2  # The first step allocates the optimizer's state; after it DDP arranges its buckets anew


@dataclass
class Replica:
    """A training step whose gradients are averaged over the ranks, or not."""

    step: Step
    batches: list[Batch]
    wrapper: Any = None  # DataParallel or DDP; None: FSDP2, which is in the model

    def __call__(
        self, batches: list[Batch] | None = None, on_phase: Callable[[str], None] = lambda phase: None
    ) -> None:
        """Run one step of all ranks."""

        def begin(phase: str) -> None:
            if phase == "optimizer" and isinstance(self.wrapper, DataParallel):
                self.wrapper.wait_for_gradients()
            on_phase(phase)

        self.step(batches or self.batches, on_phase=begin)

    def alone(self) -> None:
        """Run the same step without communication. Weights of the ranks then differ."""
        with self.wrapper.no_sync():
            self.step(self.batches)


def replica(
    recipe: Recipe, rank: Rank, strategy: Any, bucket_mb: float | None = 25.0, sharding: Sharding = "none"
) -> Replica:
    """Return a step of whole weights on every rank.

    Args:
        strategy: of ``DataParallel``, or ``DDP``.
    """
    step = assemble(recipe, rank.device)
    batches = step.random_batches(seed=rank.number)
    if sharding != "none":
        (optimizer,) = step.optimizers
        kind = type(optimizer)
        known = inspect.signature(kind).parameters
        options = {name: value for name, value in optimizer.defaults.items() if name in known}
        step.optimizers = [_sharded(sharding)(step.model.parameters(), optimizer_class=kind, **options)]
    if strategy == DDP:
        wrapper: nn.Module = DistributedDataParallel(step.model, bucket_cap_mb=bucket_mb)
    else:
        wrapper = DataParallel(step.model, strategy, bucket_mb)
    step.model = wrapper
    return Replica(step, batches, wrapper)


def _sharded(sharding: Sharding) -> Any:
    if sharding == "ours":
        return ShardedOptimizer
    from torch.distributed.optim import ZeroRedundancyOptimizer  # Takes 0.3 s.

    return ZeroRedundancyOptimizer


def fully_sharded(recipe: Recipe, rank: Rank, reshard_after_forward: bool) -> Replica:
    """Return a step with FSDP2 over each decoder block.

    Without resharding after the forward, gathered weights stay until the backward.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(rank.device.type, (rank.world_size,))

    def shard(model: nn.Module) -> None:
        for block in decoder_blocks(model):
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard_after_forward)

    step = assemble(recipe, rank.device, on_model=shard)
    return Replica(step, step.random_batches(seed=rank.number))


def seconds_of(rank: Rank, run: Callable[[], object]) -> float:
    """Return the seconds of a run that all ranks begin together, on this rank."""
    rank.start_together()
    begin = time.perf_counter()
    run()
    rank.synchronize()
    return time.perf_counter() - begin


def profiled(rank: Rank, one: Replica) -> profile:
    """Return the profile of one step with the shapes of its operations."""
    activities = [ProfilerActivity.CPU]
    if rank.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, record_shapes=True) as seen:
        rank.start_together()  # The profiler takes seconds to start, and not equally long on all ranks.
        run_in_phases(one, one.batches)
        rank.synchronize()
    return seen


def tidy(rank: Rank) -> None:
    """Free what a replica left; its wrapper's hooks are cycles of references."""
    gc.collect()
    if rank.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
