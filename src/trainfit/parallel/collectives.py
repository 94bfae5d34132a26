"""Collectives that the wrappers share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None
"""A process group; None is the default group."""


def all_gather(out: Tensor, shard: Tensor, group: Group = None) -> None:
    """Fill ``out`` with the shards of all ranks, along the first dimension."""
    _SINGLE["all_gather"](out, shard, group=group)


def reduce_scatter(out: Tensor, whole: Tensor, group: Group = None, op: Any = dist.ReduceOp.SUM) -> None:
    """Fill ``out`` with this rank's part of the reduced tensor, along the first dimension."""
    _SINGLE["reduce_scatter"](out, whole, op=op, group=group)


_SINGLE: Any = {
    "all_gather": getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor,
    "reduce_scatter": getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor,
}
"""Names before torch 2.13 -> functions."""


class Average:
    """An all-reduce in progress that leaves the mean over the group in each of ``tensors``, in place.

    The tensors have one dtype and device. Several are reduced as one collective: NCCL takes a list of
    buffers without copying them together; gloo copies them.
    """

    def __init__(self, tensors: list[Tensor], group: Group = None):
        self.tensors = tensors
        averages = can_average(tensors[0], group)
        self._divisor = 1 if averages else dist.get_world_size(group)
        op = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
        self._work = all_reduce(tensors, op, group)

    def wait(self) -> None:
        """Wait for the mean; on a GPU the current stream waits, not the host."""
        if self._work is not None:
            self._work.wait()
        if self._divisor > 1:
            torch._foreach_div_(self.tensors, self._divisor)


def can_average(tensor: Tensor, group: Group) -> bool:
    """Return whether a reduction can average: NCCL's can, gloo's only add. A group may have both.

    PyTorch's ``fake`` backend, of one rank without the others, stands for NCCL.
    """
    backend = dist.get_backend(group)
    return backend == "fake" or (tensor.is_cuda and "nccl" in backend)


def all_reduce(tensors: list[Tensor], op: Any, group: Group) -> dist.Work | None:
    """Begin one all-reduce of all tensors.

    ``dist.all_reduce_coalesced`` is the same call after more checks, with a deprecation warning.
    """
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp, options.asyncOp = op, True
    members = group if group is not None else dist.group.WORLD
    assert members is not None
    return members.allreduce_coalesced(tensors, options)


def broadcast(tensors: Iterable[Tensor], group: Group = None, group_rank: int = 0) -> None:
    """Overwrite the tensors of all ranks with those of one rank of the group."""
    source = dist.get_global_rank(group, group_rank) if group is not None else group_rank
    works = [dist.broadcast(tensor.detach(), source, group, async_op=True) for tensor in tensors]
    for work in works:
        if work is not None:
            work.wait()
