"""Join the process group of a run: one process a GPU, as torchrun starts them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainfit.spec.recipe import Parallel


def local_device(device_type: str) -> torch.device:
    """Return this rank's device: the GPU of its local rank, or the CPU."""
    if device_type != "cuda":
        return torch.device(device_type)
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


@contextmanager
def process_group(mesh: Parallel, device: torch.device) -> Iterator[DeviceMesh]:
    """Initialise NCCL (GPU tensors) and gloo (CPU tensors) from torchrun's environment; yield the mesh.

    NCCL's communicators are made on first use: each takes device memory, 366 MiB between two H200s (NCCL
    2.28.9), and the default group's is not needed. Exchange small values as CPU tensors. A process group
    that exists is used and kept.

    Args:
        mesh: of as many ranks as there are processes (``recipe.mesh``).
        device: this rank's.
    """
    existed = dist.is_initialized()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not existed:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        sizes = mesh.dimensions
        yield init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    finally:
        if not existed:
            dist.destroy_process_group()
