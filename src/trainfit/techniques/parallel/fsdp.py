"""Fully sharded data parallel: ``torch.distributed.fsdp.fully_shard`` (FSDP2) over each decoder block.

Parameters, gradients and optimizer state are sharded; each block's parameters are gathered before its forward
and its backward. Several replicas of the shards (HSDP) all-reduce their gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainfit.catalog.load import model_config
from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Technique
from trainfit.techniques.draft import Draft
from trainfit.techniques.parallel._ranks import check_gpus, check_processes, check_values

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

ALLOWED: dict[str, tuple[object, ...]] = {
    "precision": ("bf16", "fp32", "amp-bf16", "mixed-bf16"),
    "loss": ("standard",),
    "recompute": ("none", "full", "selective", "every"),
    "compile": (False, "block"),
    "adapter.kind": (None, "lora"),
    "optimizer.clip_norm": (None,),
    "optimizer.in_backward": (False,),
    "optimizer.stochastic_rounding": (False,),
    "optimizer.name": ("adamw", "sgd"),
    "quantize": (None,),
    "offload.activations": (False,),
    "offload.weights": (False,),
}
"""Field -> values whose peaks were compared with measured runs, or that act on each shard alone."""
MAX_TRACED_LAYERS = 64
"""Of deeper models three layers stand for all (70B over 64: -0.03 % allocated, +0.12 % reserved)."""


def check(recipe: Recipe) -> None:
    """Refuse what does not work on sharded parameters, or was not tried.

    Raises:
        InputError: naming the field.
    """
    check_gpus(recipe)
    check_values(recipe, ALLOWED, "FSDP2")


def apply(recipe: Recipe, draft: Draft) -> None:
    """Shard each decoder block, then what is left as one group."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    from trainfit.models.layers import decoder_blocks

    assert draft.mesh is not None, "a recipe for several GPUs is assembled with a mesh"
    mesh = recipe.mesh
    options: dict[str, Any] = {
        "mesh": draft.mesh["replicate", "shard"] if mesh.replicate > 1 else draft.mesh["shard"],
        "mp_policy": _policy(recipe),
    }
    for block in decoder_blocks(draft.model):
        fully_shard(block, reshard_after_forward=mesh.reshard_after_forward, **options)
    model = fully_shard(draft.model, **options)
    assert isinstance(model, FSDPModule)
    if not mesh.syncs_each_batch and recipe.batch.accumulate > 1:
        draft.before_batch.append(model.set_requires_gradient_sync)


def _policy(recipe: Recipe) -> MixedPrecisionPolicy:
    """Return bf16 compute and fp32 reduction for mixed-bf16; else everything in the weights' dtype."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if recipe.precision != "mixed-bf16":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _describe(recipe: Recipe) -> str:
    mesh = recipe.mesh
    shards = f"FSDP2 over {mesh.shard}"
    if mesh.replicate == 1:
        return shards
    return f"{mesh.replicate} replicas of {shards}" if mesh.shard > 1 else f"FSDP2, {mesh.replicate} replicas"


def _trace_whole(recipe: Recipe) -> bool:
    """Return whether every layer is traced: when a block is gathered and freed depends on its neighbours."""
    config = model_config(recipe.model.config)
    return int(config.get("num_hidden_layers", 0)) <= MAX_TRACED_LAYERS  # pyright: ignore[reportArgumentType]


TECHNIQUE = Technique(
    name="fsdp",
    order=235,
    title="Fully sharded data parallel",
    fields=("parallel.shard", "parallel.replicate", "parallel.reshard_after_forward"),
    when=lambda recipe: recipe.mesh.data_ranks > 1 and recipe.mesh.shards_weights,
    check=check,
    check_device=check_processes,
    apply=apply,
    describe=_describe,
    variants=(
        {"hardware": {"count": 2}},
        {"hardware": {"count": 4}, "parallel": {"replicate": 2, "shard": 2}},
        {"hardware": {"count": 2}, "parallel": {"reshard_after_forward": False}},
    ),
    trace_whole=_trace_whole,
)
