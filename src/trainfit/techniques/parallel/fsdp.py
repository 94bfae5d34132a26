"""Fully sharded data parallel: ``torch.distributed.fsdp.fully_shard`` (FSDP2) over each decoder block.

Parameters, gradients and optimizer state are sharded; each block's parameters are gathered before its forward
and its backward. Several replicas of the shards (HSDP) all-reduce their gradients.
"""

from __future__ import annotations

from trainfit.catalog.load import model_config
from trainfit.catalog.names import CPU
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Technique, value_at
from trainfit.techniques.draft import Draft

ALLOWED: dict[str, tuple[object, ...]] = {
    "precision": ("bf16", "fp32", "amp-bf16"),
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
    if recipe.hardware.gpu == CPU:
        raise InputError(
            "gpu: cpu is this machine, one device",
            "name a GPU, such as hardware.gpu: h100-sxm, or use hardware.count: 1",
            field="hardware.count",
            value=recipe.hardware.count,
        )
    for field, values in ALLOWED.items():
        value = value_at(recipe, field)
        if value not in values:
            works = ", ".join(str(one).lower() for one in values)
            raise InputError(
                f"not there yet on several GPUs (hardware.count: {recipe.hardware.count})",
                f"with FSDP2 there is now: {works}",
                field=field,
                value=value,
            )


def check_device(recipe: Recipe, device_type: str) -> None:
    """Refuse to run on real devices.

    Raises:
        InputError: always; first what ``check`` refuses.
    """
    check(recipe)
    raise InputError(
        "several GPUs are predicted; they are not measured or trained on in this version",
        "use hardware.count: 1, or predict",
        field="hardware.count",
        value=recipe.hardware.count,
    )


def apply(recipe: Recipe, draft: Draft) -> None:
    """Shard each decoder block, then what is left as one group."""
    from torch.distributed.fsdp import fully_shard

    from trainfit.models.layers import decoder_blocks

    assert draft.mesh is not None, "a recipe for several GPUs is assembled with a mesh"
    mesh = draft.mesh if recipe.mesh.replicate > 1 else draft.mesh["shard"]
    for block in decoder_blocks(draft.model):
        fully_shard(block, mesh=mesh)
    fully_shard(draft.model, mesh=mesh)


def mesh_of(recipe: Recipe) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the mesh's sizes and their names; ranks of one replica are neighbours."""
    return (recipe.mesh.replicate, recipe.mesh.shard), ("replicate", "shard")


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
    fields=("parallel.shard", "parallel.replicate"),
    when=lambda recipe: recipe.mesh.world_size > 1,
    check=check,
    check_device=check_device,
    apply=apply,
    describe=_describe,
    variants=(
        {"hardware": {"count": 2}},
        {"hardware": {"count": 4}, "parallel": {"replicate": 2, "shard": 2}},
    ),
    trace_whole=_trace_whole,
)
