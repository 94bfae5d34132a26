"""Steps of several ranks that start from a folder's weights."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from saved_weights import batch_of, recipe_for
from trainfit.step import assemble

CPU = torch.device("cpu")


def started(folder: Path, implementation: str, fields: dict[str, Any]) -> tuple[float, float, float, int]:
    """Start a step on all ranks, and one on this process alone.

    Returns:
        The first loss of both, the largest difference of their parameters of equal shape, and the bytes that
        this rank read.
    """
    count = {"gpu": "h200", "count": dist.get_world_size()}
    recipe = recipe_for(folder, implementation, hardware=count, **fields)
    sizes = recipe.mesh.dimensions
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    step = assemble(recipe, CPU, mesh=mesh)
    assert step.weights is not None
    alone = assemble(recipe_for(folder, implementation, **fields | {"parallel": {}}), CPU)
    expected = dict(alone.model.named_parameters())
    apart = 0.0
    for name, one in step.model.named_parameters():
        whole = one.full_tensor() if isinstance(one, DTensor) else one
        of_alone = expected.get(name.removeprefix("module."))
        if of_alone is not None and of_alone.shape == whole.shape:
            apart = max(apart, (whole - of_alone).abs().max().item())
    losses = [one([batch_of()]).item() for one in (step, alone)]
    return *losses, apart, step.weights.bytes_read
