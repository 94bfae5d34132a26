"""Collectives that the wrappers share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None
"""A process group; None is the default group."""


def all_gather(out: Tensor, shard: Tensor, group: Group = None) -> None:
    """Fill ``out`` with the shards of all ranks, along the first dimension."""
    _SINGLE["all_gather"](out, shard, group=group)


def reduce_scatter(out: Tensor, whole: Tensor, group: Group = None) -> None:
    """Fill ``out`` with this rank's part of the sum, along the first dimension."""
    _SINGLE["reduce_scatter"](out, whole, group=group)


_SINGLE: Any = {
    "all_gather": getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor,
    "reduce_scatter": getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor,
}
"""Names before torch 2.13 -> functions."""


class Average:
    """An all-reduce in progress that leaves the mean over the group in ``tensor``."""

    def __init__(self, tensor: Tensor, group: Group = None):
        self.tensor = tensor
        self._divisor = 1 if dist.get_backend(group) == "nccl" else dist.get_world_size(group)
        op = dist.ReduceOp.AVG if self._divisor == 1 else dist.ReduceOp.SUM
        self._work = dist.all_reduce(tensor, op, group, async_op=True)

    def wait(self) -> Tensor:
        """Return the mean; on a GPU the current stream waits, not the host."""
        if self._work is not None:
            self._work.wait()
        return self.tensor.div_(self._divisor) if self._divisor > 1 else self.tensor


def broadcast(tensors: Iterable[Tensor], group: Group = None, group_rank: int = 0) -> None:
    """Overwrite the tensors of all ranks with those of one rank of the group."""
    source = dist.get_global_rank(group, group_rank) if group is not None else group_rank
    works = [dist.broadcast(tensor.detach(), source, group, async_op=True) for tensor in tensors]
    for work in works:
        if work is not None:
            work.wait()
