"""Memory of a rank that the other ranks of its host read and write. On a CPU all of them map files."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class PeerMemory:
    """Memory of this rank that the others can read and write, and theirs; made by all ranks at once."""

    def __init__(self, num_bytes: int, device: torch.device):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.others = [(self.rank + i) % self.size for i in range(1, self.size)]
        self._handle: Any = None
        if device.type == "cuda":
            from torch.distributed import _symmetric_memory as symmetric

            own = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
            assert dist.group.WORLD is not None
            self._handle = symmetric.rendezvous(own, dist.group.WORLD.group_name)
            self._of = [self._handle.get_buffer(rank, (num_bytes,), torch.uint8) for rank in range(self.size)]
        else:
            self._of = _shared_files(num_bytes)

    def moved(self, tensor: Tensor, region: slice) -> Tensor:
        """Return the tensor as one in this memory."""
        return self.at(self.rank, region, tensor.dtype).view(tensor.shape).copy_(tensor)

    def at(self, rank: int, region: slice, dtype: torch.dtype) -> Tensor:
        """Return what a rank has at a region, one-dimensional."""
        return self._of[rank][region].view(dtype)

    def received(self, gradient: Tensor, region: slice) -> Tensor:
        """Return this rank's part of a gradient as it came from each other rank, [others, elements]."""
        return self.at(self.rank, region, gradient.dtype).view(len(self.others), -1)

    def barrier(self) -> None:
        """Let the current stream wait until those of all ranks come here."""
        if self._handle is None:
            dist.barrier()
        else:
            self._handle.barrier(channel=0)

    def read(self, outputs: list[Tensor], regions: list[slice]) -> None:
        """Copy what every rank has at each region into the output's rows, [ranks, ...]."""
        for output, region in zip(outputs, regions, strict=True):
            rows = output.view(self.size, -1)
            for rank in (*self.others, self.rank):
                rows[rank].copy_(self.at(rank, region, output.dtype), non_blocking=True)

    def write(self, gradients: list[Tensor], regions: list[slice]) -> None:
        """Copy each rank's part of the gradients into its memory: region [i] is of the i-th other rank."""
        for gradient, region in zip(gradients, regions, strict=True):
            length = (region.stop - region.start) // len(self.others) // gradient.element_size()
            for rank in self.others:
                part = gradient.flatten()[rank * length : (rank + 1) * length]
                at = self.at(rank, region, gradient.dtype).view(len(self.others), length)
                at[(self.rank - rank) % self.size - 1][: part.numel()].copy_(part, non_blocking=True)


def _shared_files(num_bytes: int) -> list[Tensor]:
    """Return a CPU tensor of each rank that all of them map."""
    folder = [tempfile.mkdtemp(prefix="trainfit-peers-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    files = [Path(str(folder[0])) / str(rank) for rank in range(dist.get_world_size())]
    files[dist.get_rank()].write_bytes(b"")
    os.truncate(files[dist.get_rank()], num_bytes)
    dist.barrier()
    found = [torch.from_file(str(file), shared=True, size=num_bytes, dtype=torch.uint8) for file in files]
    dist.barrier()
    files[dist.get_rank()].unlink()
    dist.barrier()
    if dist.get_rank() == 0:
        Path(str(folder[0])).rmdir()
    return found
