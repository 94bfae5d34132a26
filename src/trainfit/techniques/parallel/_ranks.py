"""Checks that all kinds of parallelism share."""

from __future__ import annotations

import os

from trainfit.catalog.names import CPU
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Parallel, Recipe
from trainfit.techniques import registry
from trainfit.techniques.base import Data, Expected, refusal, value_at

NOT_SPLIT = 0.1
"""Share of activations that tensor and context parallel ranks do not divide (0.09 to 0.11)."""


def expected(recipe: Recipe, parallel: Data) -> Expected:
    """Return the expected effect of other fields of ``parallel`` on a recipe."""
    before = recipe.mesh
    after = recipe.parallel.model_copy(update=parallel).over(recipe.hardware.count)
    ranks = after.tensor * after.context / (before.tensor * before.context)
    part, time = (NOT_SPLIT + (1 - NOT_SPLIT) / ranks, 1 + 0.04 * ranks) if ranks > 1 else (1.0, 1.0)
    weights, state = (old / new for old, new in zip(_sharing(before), _sharing(after), strict=True))
    gradients = weights
    if not after.reshard_after_forward and before.reshard_after_forward:
        weights *= max(1, after.shard)
    return Expected(weights, gradients, state, part, part, part, time)


def kept_bytes(recipe: Recipe, parallel: Data) -> tuple[float, float]:
    """Return the least bytes of weights, and of weights and gradients, that every GPU keeps of a parameter.

    0 where no bound is known: with a quantised base, or with tensor, expert or pipeline parallelism.
    """
    mesh = recipe.mesh
    if recipe.quantize is not None or mesh.tensor * mesh.expert * mesh.pipeline > 1:
        return 0.0, 0.0
    width = recipe.weight_bytes
    if parallel.get("strategy") in ("ddp", "zero1"):
        return width, width
    if (shard := parallel.get("shard")) is not None:
        return width / shard, width / shard
    # FSDP2 gathers weights and reduces gradients in at least 16 bits.
    gathered, reduced = (
        2 * (parallel.get(name) is False) for name in ("reshard_after_forward", "sync_each_batch")
    )
    return gathered, reduced


def _sharing(mesh: Parallel) -> tuple[int, int]:
    """Return the numbers of ranks that share weights and gradients, and that share the optimizer's state."""
    split = mesh.tensor * mesh.pipeline
    if mesh.shards_weights:
        ranks = mesh.shard * mesh.context * split
        return ranks, ranks
    return split, split * (mesh.data_ranks if mesh.strategy == "zero1" else 1)


def check_gpus(recipe: Recipe) -> None:
    """Refuse more than one virtual CPU.

    Raises:
        InputError: naming the field.
    """
    if recipe.hardware.gpu == CPU:
        raise InputError(
            "gpu: cpu is this machine, one device",
            "name a GPU, such as hardware.gpu: h100-sxm (train and measure take it with --device cpu), "
            "or use hardware.count: 1",
            field="hardware.count",
            value=recipe.hardware.count,
        )


def check_values(recipe: Recipe, allowed: dict[str, tuple[object, ...]], kind: str) -> None:
    """Refuse values of fields that do not work with ``kind``.

    Raises:
        InputError: naming the field.
    """
    for field, values in allowed.items():
        value = value_at(recipe, field)
        if value not in values:
            works = ", ".join(str(one).lower() for one in values)
            raise InputError(
                f"not supported on several GPUs (hardware.count: {recipe.hardware.count})",
                f"with {kind} use {works}",
                field=field,
                value=value,
            )


def check_optimizer(recipe: Recipe, technique: str, kind: str) -> None:
    """Refuse an optimizer that does not work on a technique's shards; ``kind`` names the technique.

    Raises:
        InputError: naming the field.
    """
    check_values(recipe, {"optimizer.name": registry.optimizers_sharded_by(technique)}, kind)


def check_buckets(recipe: Recipe, kind: str) -> None:
    """Refuse a size of buckets where gradients are not reduced in buckets.

    Raises:
        InputError: naming the field.
    """
    if recipe.mesh.bucket_mb != Parallel().bucket_mb:
        problem = f"{kind} has no buckets of gradients"
        remedy = "leave it out, or use parallel.strategy: ddp, zero1 or bucketed"
        raise refusal(recipe, "parallel.bucket_mb", problem, remedy)


def check_processes(recipe: Recipe, device_type: str) -> None:
    """Refuse to run in a process that is not a rank of a process group of the recipe's size.

    Raises:
        InputError: naming ``hardware.count``.
    """
    check_gpus(recipe)
    import torch.distributed as dist

    count = recipe.hardware.count
    # Before a rank joins its process group, torchrun's environment has the number.
    found = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if found != count:
        raise InputError(
            f"{count} GPUs need {count} processes, and this run has {found}",
            f"use trainfit train --gpus {count}, or torchrun --nproc-per-node {count} -m trainfit train",
            field="hardware.count",
            value=count,
        )
