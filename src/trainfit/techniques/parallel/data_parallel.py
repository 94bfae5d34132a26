"""Data parallel with whole weights on every rank: torch's DDP, this package's, and DDP with ZeRO-1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Data, Offer, Technique, refusal
from trainfit.techniques.draft import Draft
from trainfit.techniques.parallel._ranks import (
    check_buckets,
    check_gpus,
    check_processes,
    check_values,
    expected,
    kept_bytes,
)

if TYPE_CHECKING:
    from trainfit.parallel.data_parallel import Strategy

ALLOWED: dict[str, tuple[object, ...]] = {
    "optimizer.in_backward": (False,),
    "quantize": (None, "nf4", "int8"),
    "offload.weights": (False,),
    "parallel.prefetch": (None,),
    "parallel.copy_engines": (False,),
}
"""Field -> values that work with replicated weights."""
TITLES = {
    "ddp": "torch's DDP",
    "zero1": "DDP with a sharded optimizer",
    "naive": "one all-reduce a parameter",
    "flat": "one all-reduce",
    "overlapped": "one overlapped all-reduce a parameter",
    "bucketed": "overlapped buckets",
}
OURS = ("naive", "flat", "overlapped", "bucketed")
"""Strategies of ``trainfit.parallel.DataParallel``."""
BUCKETED = ("ddp", "zero1", "bucketed")
"""Strategies that use ``parallel.bucket_mb``."""


def check(recipe: Recipe) -> None:
    """Refuse meshes other than replicas, and values that do not work with replicas."""
    check_gpus(recipe)
    mesh = recipe.mesh
    if mesh.replicate * mesh.pipeline != recipe.hardware.count:
        problem = f"{mesh.strategy} keeps whole weights on every rank, and the mesh has other ranks"
        remedy = "use parallel.strategy: fsdp, or only replicas and a pipeline"
        raise refusal(recipe, "parallel.strategy", problem, remedy)
    check_values(recipe, ALLOWED, mesh.strategy)
    if mesh.strategy not in BUCKETED:
        check_buckets(recipe, mesh.strategy)
    if not mesh.reshard_after_forward:
        problem = f"{mesh.strategy} keeps whole weights on every rank, so there is nothing to reshard"
        remedy = "leave it out, or use parallel.strategy: fsdp"
        raise refusal(recipe, "parallel.reshard_after_forward", problem, remedy)
    if mesh.strategy in OURS and mesh.syncs_each_batch and recipe.batch.accumulate > 1:
        problem = f"{mesh.strategy} averages gradients once a step"
        remedy = "leave sync_each_batch out, or use parallel.strategy: ddp"
        raise refusal(recipe, "parallel.sync_each_batch", problem, remedy)


def apply(recipe: Recipe, draft: Draft) -> None:
    """Wrap the forward and the loss, so that the backward reduces gradients."""
    from torch._dynamo import config as dynamo
    from torch.nn.parallel import DistributedDataParallel

    from trainfit.parallel.data_parallel import DataParallel
    from trainfit.parallel.training_forward import TrainingForward

    assert draft.mesh is not None, "a recipe for several GPUs is assembled with a mesh"
    mesh, group = recipe.mesh, draft.mesh["replicate"].get_group()
    module = TrainingForward(draft.model, draft.loss)
    if mesh.strategy in ("ddp", "zero1"):
        no_bound = sum(parameter.nbytes for parameter in module.parameters()) / 2**20 + 1
        wrapped: Any = DistributedDataParallel(
            module, process_group=group, bucket_cap_mb=mesh.bucket_mb or no_bound
        )
        wrapped.broadcast_buffers = False  # Buffers are constants, equal on all ranks from the start.
        if recipe.compile:
            # Dynamo would cut a block's graph at DDP's buckets, which its backward fills at once.
            draft.around_forward.append(lambda: dynamo.patch(optimize_ddp=False))
    else:
        strategy, averages = cast("Strategy", mesh.strategy), draft.cluster.averages
        wrapped = DataParallel(module, strategy, mesh.bucket_mb, group=group, on_average=averages)
        draft.after_backward.append(wrapped.wait_for_gradients)
    draft.wrapped = wrapped
    if not mesh.syncs_each_batch:
        draft.before_batch.append(lambda last: setattr(wrapped, "require_backward_grad_sync", last))
    if mesh.strategy == "zero1":
        _shard_optimizer(draft, group)


def _shard_optimizer(draft: Draft, group: Any) -> None:
    from torch.optim import SGD

    from trainfit.parallel.sharded_optimizer import ShardedOptimizer

    make = draft.make_optimizer
    assert make is not None

    def inner(groups: list[dict[str, Any]]) -> Any:
        owned = [parameter for one in groups for parameter in one["params"]]
        if not owned:
            return SGD(groups)  # A rank without shards updates nothing.
        return make(owned if len(groups) == 1 else groups)

    choose = draft.cluster.optimizer_rank
    sharded: Any = ShardedOptimizer
    draft.make_optimizer = lambda parameters: sharded(parameters, inner, group, choose)


def _offers(recipe: Recipe) -> tuple[Offer, ...]:
    meshes: tuple[Data, ...] = ({"strategy": "ddp"}, {"strategy": "zero1"})
    return tuple(
        Offer({"parallel": mesh}, expected(recipe, mesh), kept_bytes(recipe, mesh))
        for mesh in meshes
        if recipe.hardware.count > 1
    )


TECHNIQUE = Technique(
    name="data_parallel",
    order=320,
    title="Data parallel",
    fields=("parallel.strategy", "parallel.bucket_mb"),
    when=lambda recipe: recipe.hardware.count > 1 and not recipe.mesh.shards_weights,
    check=check,
    check_device=check_processes,
    apply=apply,
    describe=lambda recipe: f"{TITLES[recipe.mesh.strategy]}, {recipe.mesh.replicate} replicas",
    variants=tuple({"hardware": {"count": 2}, "parallel": {"strategy": name}} for name in TITLES),
    # Buckets hold the gradients of all layers: with a few layers traced, memory is 10 to 26 % low.
    trace_whole=lambda recipe: True,
    offers=_offers,
)
