"""A recipe's step on this process alone and as one rank of its mesh."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from adapter_shards import compile_whole
from tiny_recipe import tiny_recipe, wide_recipe
from trainfit.spec.recipe import Batch, Hardware, Optimizer, Parallel, Recipe
from trainfit.step import assemble

STEPS = 3


def losses_and_norms(recipe: Recipe) -> tuple[list[float], dict[str, float]]:
    """Return each step's loss, and the norm of each parameter's whole gradient in the first one.

    Adam's first updates depend on the signs of gradients near zero, so those of later steps differ more.
    """
    sizes = recipe.mesh.dimensions
    mesh = (
        init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        if recipe.hardware.count > 1
        else None
    )
    step = assemble(recipe, torch.device("cpu"), compiler=compile_whole, mesh=mesh)
    norms: dict[str, float] = {}

    def on_phase(phase: str) -> None:
        if phase != "optimizer" or norms:
            return
        for name, parameter in step.model.named_parameters():
            gradient: Any = parameter.grad
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            norms[name] = whole.norm().item()

    losses = [step(step.random_batches(10 * n), on_phase=on_phase).item() for n in range(STEPS)]
    return losses, norms


def apart(implementation: str, config: dict[str, Any], fields: dict[str, Any], mesh: dict[str, Any]) -> float:
    """Return the largest difference between two ranks and one process: of losses, and relative of norms."""
    torch.compiler.reset()  # Compiled blocks of the cases before count towards Dynamo's limit.
    recipe = tiny_recipe(implementation, optimizer=Optimizer(lr=1e-2), **fields)
    model = recipe.model.model_copy(update={"config": {**dict(recipe.model.config), **config}})  # pyright: ignore
    alone = recipe.model_copy(update={"model": model})
    update = {"hardware": Hardware(gpu="h200", count=2), "parallel": Parallel(**mesh)}
    losses, norms = losses_and_norms(alone)
    found, found_norms = losses_and_norms(alone.model_copy(update=update))
    assert found_norms.keys() == norms.keys()
    return max(
        *(abs(one - other) for one, other in zip(found, losses, strict=True)),
        *(abs(found_norms[name] / norm - 1) if norm else found_norms[name] for name, norm in norms.items()),
    )


def recipe_losses(fields: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Return the losses of three steps of a tiny recipe on all ranks, and of one process on all batches."""
    num_ranks, cpu = dist.get_world_size(), torch.device("cpu")
    base = wide_recipe(2, batch=Batch(micro=1, seq=16)).content()
    recipe = Recipe.model_validate(base | {"hardware": Hardware(gpu="h200", count=num_ranks)} | fields)
    sizes = recipe.mesh.dimensions
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    step = assemble(recipe, cpu, mesh=mesh)
    losses = []
    for number in range(STEPS):
        loss = step(step.random_batches(10 * number))
        dist.all_reduce(loss)
        losses.append(loss.item() / num_ranks)
    num_batches = recipe.mesh.data_ranks * recipe.mesh.context
    alone = recipe.model_copy(
        update={
            "hardware": Hardware(gpu="h200"),
            "parallel": Parallel(),
            "batch": Batch(micro=1, seq=16, accumulate=num_batches),
        }
    )
    whole = assemble(alone, cpu)
    own = assemble(alone.model_copy(update={"batch": Batch(micro=1, seq=16)}), cpu)
    expected = []
    for number in range(STEPS):
        batches = [own.random_batches(10 * number + rank)[0] for rank in range(num_batches)]
        expected.append(whole(batches).item())
    return losses, expected
