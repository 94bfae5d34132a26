"""Checks that all kinds of parallelism share."""

from __future__ import annotations

import os

from trainfit.catalog.names import CPU
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Parallel, Recipe
from trainfit.techniques import registry
from trainfit.techniques.base import refusal, value_at


def check_gpus(recipe: Recipe) -> None:
    """Refuse several of the virtual CPU.

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
    """Refuse values of fields that ``kind`` does not work with.

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
    """Refuse an optimizer that does not work on the shards of a technique, which ``kind`` names.

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
