"""FSDP2's collectives among the GPUs of one host as copies by their copy engines, without NCCL.

An all-gather reads the other ranks' shards straight into the unsharded parameters, so nothing is copied into
or out of a buffer. A reduce-scatter writes a part of each gradient into each other rank's memory, and kernels
average what came with this rank's part. No SM sends, so the computation keeps all of them.

FSDP2's own rules order the streams. Two more make the copies safe: the first gather after an update waits for
all ranks, whose shards are then updated; and each reduction waits for all ranks after it has written, so no
rank's slot is written before what came two reductions ago has been read.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group

from trainfit.parallel.cluster import REAL, Cluster
from trainfit.parallel.peer_memory import PeerMemory

ALIGN = 256
"""Bytes between the beginnings of tensors in shared memory."""


class Regions:
    """Consecutive regions of tensors in shared memory, in bytes."""

    def __init__(self, begin: int = 0):
        self.end = begin

    def take(self, num_bytes: int) -> slice:
        """Return the region of a tensor of so many bytes."""
        begin = self.end
        self.end += -(-num_bytes // ALIGN) * ALIGN
        return slice(begin, begin + num_bytes)


class PeerGather(_fsdp_collectives.DefaultAllGather):
    """All-gathers of an FSDP2 model whose shards it moves to peer memory at the first one."""

    def __init__(self, model: FSDPModule, cluster: Cluster):
        self._model, self._cluster = model, cluster
        self._memory: PeerMemory | None = None
        self._regions: dict[Any, slice] = {}
        self.is_updated = True
        """The shards have changed since the last gather."""

    def gather(self, params: list[Any], stream: Any) -> Any:
        """Begin to read all shards of each parameter into its unsharded storage."""
        device = params[0]._sharded_param_data.device
        handle = torch.cuda if device.type == "cuda" else torch.cpu
        if self._memory is None:
            self._memory = self._moved(device)
        outputs: list[Tensor] = []
        for one in params:
            shard = one._sharded_param_data
            one.init_all_gather_outputs([shard.numel()], [shard.dtype], self._memory.size, device)
            one.alloc_all_gather_outputs()
            outputs += one.all_gather_outputs
        stream.wait_stream(handle.current_stream())  # The storage may have been freed there.
        with handle.stream(stream), torch.autograd._unsafe_preserve_version_counter(tuple(outputs)):
            if self.is_updated:
                self._memory.barrier()
                self.is_updated = False
            self._memory.read(outputs, [self._regions[one] for one in params])
            return Gathered(outputs[0][:0], stream.record_event(), None, [], [], [])

    def _moved(self, device: torch.device) -> PeerMemory:
        regions = Regions()
        for group in param_groups(self._model):
            for one in group.fsdp_params:
                self._regions[one] = regions.take(one._sharded_param_data.nbytes)
        memory = self._cluster.peer_memory(regions.end, device)
        with torch.no_grad():
            for one, region in self._regions.items():
                local = one.sharded_param._local_tensor
                one._sharded_param_data = memory.moved(one._sharded_param_data, region)
                local.data = one._sharded_param_data[: local.numel()].view(local.shape)
        return memory


class Gathered(_fsdp_collectives.AllGatherResult):
    """An all-gather whose output is the parameters' own storage."""


class PeerReduceScatter(_fsdp_collectives.DefaultReduceScatter):
    """Reduce-scatters of an FSDP2 model; every other one uses the same slot of peer memory."""

    def __init__(self, model: FSDPModule, cluster: Cluster):
        self._model, self._cluster = model, cluster
        self._memory: PeerMemory | None = None
        self._slot_bytes = self._num_called = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an output; of the input, allocated first, only the gradients in it are needed."""
        self._num_called += 1
        is_input = self._num_called % 2 == 1
        return torch.empty(0 if is_input else size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **_: Any) -> None:  # pyright: ignore
        memory = self._memory = self._memory or self._slots(output_tensor.device)
        gradients: list[Tensor] = input_tensor.gradients  # pyright: ignore[reportAttributeAccessIssue]
        sent, regions = len(memory.others), Regions(self._slot_bytes * (self._num_called // 2 % 2))
        rows = [-(-one.shape[0] // memory.size) for one in gradients]
        lengths = [row * one[:1].numel() for row, one in zip(rows, gradients, strict=True)]
        where = [
            regions.take(sent * length * one.element_size())
            for length, one in zip(lengths, gradients, strict=True)
        ]
        memory.write(gradients, where)
        memory.barrier()
        begin = 0
        for gradient, length, region in zip(gradients, lengths, where, strict=True):
            own = gradient.flatten()[memory.rank * length : (memory.rank + 1) * length]
            mean = output_tensor[begin : begin + own.numel()]
            for number, part in enumerate(memory.received(gradient, region)):
                # The mean so far is of number + 1 ranks.
                before = mean if number else own
                torch.lerp(before, part[: own.numel()], 1 / (number + 2), out=mean)
            begin += length

    def _slots(self, device: torch.device) -> PeerMemory:
        size, most = dist.get_world_size(), 0
        for group in param_groups(self._model):
            regions = Regions()
            for one in group.fsdp_params:
                regions.take((size - 1) * one._sharded_param_data.nbytes)
            most = max(most, regions.end)
        self._slot_bytes = most
        return self._cluster.peer_memory(2 * most, device)


def send_by_copies(model: FSDPModule, cluster: Cluster = REAL) -> PeerGather:
    """Let the collectives of an FSDP2 model, over all ranks, be copies; blocks must be gathered ahead.

    Args:
        cluster: gives the memory that ranks share.

    Returns:
        the gathers, which updates of the shards are reported to.
    """
    _choose_by_comm()
    gather, reduce_scatter = PeerGather(model, cluster), PeerReduceScatter(model, cluster)
    for group in param_groups(model):
        group._all_gather_comm, group._reduce_scatter_comm = gather, reduce_scatter
    return gather


def param_groups(model: Any) -> list[Any]:
    """Return the parameter groups of a model's FSDP2 modules, each once."""
    found: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            found |= {id(group): group for group in groups if group is not None}
    return list(found.values())


def _choose_by_comm() -> None:
    """Let FSDP2's functions that copy into and out of buffers leave out what copies do not need."""
    group: Any = _fsdp_param_group
    collectives: Any = _fsdp_collectives
    if hasattr(group.foreach_all_gather, "chooses"):
        return  # A trace, which replaces the function, puts it back as it was before.
    all_gather, copy_out = group.foreach_all_gather, group.foreach_all_gather_copy_out
    copy_in = collectives.foreach_reduce_scatter_copy_in

    def gather(params: Any, of: Any, is_async: Any, first: Any, stream: Any, *rest: Any) -> Any:
        comm = rest[-1]
        if isinstance(comm, PeerGather):
            return comm.gather(params, stream)
        return all_gather(params, of, is_async, first, stream, *rest)

    def copied_out(result: Any, params: Any, of: Any) -> None:
        if not isinstance(result, Gathered):
            return copy_out(result, params, of)
        handle = torch.cuda if result.all_gather_output.device.type == "cuda" else torch.cpu
        handle.current_stream().wait_event(result.all_gather_event)  # pyright: ignore
        return None

    def copied_in(gradients: Any, buffer: Tensor, world_size: int) -> None:
        if buffer.numel():
            copy_in(gradients, buffer, world_size)
        else:  # FSDP2 keeps the buffer until the reduction is done.
            buffer.gradients = list(gradients)  # pyright: ignore[reportAttributeAccessIssue]

    gather.chooses = True
    group.foreach_all_gather, group.foreach_all_gather_copy_out = gather, copied_out
    collectives.foreach_reduce_scatter_copy_in = copied_in
