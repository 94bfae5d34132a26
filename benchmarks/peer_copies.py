"""FSDP2's collectives between two GPUs of one host as copies by the copy engines, without NCCL.

An all-gather reads the other rank's shards straight into the unsharded parameters, so nothing is copied into
or out of a buffer. A reduce-scatter writes one half of each gradient into the other rank's memory, and one
kernel averages what came with this rank's half. No SM sends, so the computation keeps all of them.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group

ALIGN = 128
"""Elements between the beginnings of tensors in a shared buffer."""


class SharedBuffer:
    """A buffer of each of two ranks that both can read and write."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device):
        self._other = 1 - dist.get_rank()
        if device.type == "cuda":
            from torch.distributed import _symmetric_memory as symmetric

            self.own = symmetric.empty(numel, dtype=dtype, device=device)
            handle: Any = symmetric.rendezvous(self.own, dist.group.WORLD.group_name)  # pyright: ignore
            self.other: Tensor = handle.get_buffer(self._other, (numel,), dtype)
            self._handle = handle
            return
        path = [None]
        if dist.get_rank() == 0:
            path[0] = tempfile.mkdtemp(prefix="peer-copies-")  # pyright: ignore
        dist.broadcast_object_list(path)
        files = [str(Path(path[0] or "") / str(rank)) for rank in range(2)]
        self._handle = None
        self.own = torch.from_file(files[1 - self._other], shared=True, size=numel, dtype=dtype)
        dist.barrier()
        self.other = torch.from_file(files[self._other], shared=True, size=numel, dtype=dtype)
        dist.barrier()
        os.unlink(files[1 - self._other])

    def barrier(self) -> None:
        """Wait, on the current stream, until the other rank's stream comes here."""
        if self._handle is None:
            dist.barrier()
        else:
            self._handle.barrier(channel=0)


class Places:
    """Consecutive places of tensors in a buffer."""

    def __init__(self) -> None:
        self.numel = 0

    def take(self, numel: int) -> slice:
        """Return the place of a tensor of ``numel`` elements."""
        begin = self.numel
        self.numel += -(-numel // ALIGN) * ALIGN
        return slice(begin, begin + numel)


class SharedShards:
    """The shards of all parameters of an FSDP2 model, moved to memory that the other rank can read."""

    def __init__(self, model: FSDPModule, device: torch.device):
        self._places: dict[Any, slice] = {}
        places = Places()
        params = [one for group in param_groups(model) for one in group.fsdp_params]
        dtypes = {one._sharded_param_data.dtype for one in params}
        assert len(dtypes) == 1, f"one dtype of parameters, not {dtypes}"
        for one in params:
            assert one._orig_size[0] % 2 == 0, "a dimension that two ranks share evenly"
            self._places[one] = places.take(one._sharded_param_data.numel())
        self.buffer = SharedBuffer(places.numel, dtypes.pop(), device)
        with torch.no_grad():
            for one, place in self._places.items():
                moved = self.buffer.own[place].copy_(one._sharded_param_data)
                one._sharded_param_data = moved
                one.sharded_param._local_tensor.data = moved.view(one.sharded_param._local_tensor.shape)
        self.is_new_step = True

    def gather(self, params: list[Any], stream: Any) -> Any:
        """Begin to read both shards of each parameter into its unsharded storage."""
        device = params[0]._sharded_param_data.device
        handle = torch.cuda if device.type == "cuda" else torch.cpu
        outputs: list[Tensor] = []
        for one in params:
            shard = one._sharded_param_data
            one.init_all_gather_outputs([shard.numel()], [shard.dtype], 2, device)
            one.alloc_all_gather_outputs()
            outputs += one.all_gather_outputs
        stream.wait_stream(handle.current_stream())  # The storage may have been freed there.
        rank = dist.get_rank()
        with handle.stream(stream), torch.autograd._unsafe_preserve_version_counter(tuple(outputs)):
            if self.is_new_step:
                self.buffer.barrier()  # The other rank has updated its shards.
                self.is_new_step = False
            for one, output in zip(params, outputs, strict=True):
                halves = output.view(2, -1)
                halves[1 - rank].copy_(self.buffer.other[self._places[one]], non_blocking=True)
                halves[rank].copy_(one._sharded_param_data, non_blocking=True)
            event = stream.record_event()
        return _fsdp_collectives.AllGatherResult(outputs[0][:0], event, None, [], [], [])


class PeerReduceScatter(_fsdp_collectives.DefaultReduceScatter):
    """Average halves of gradients, each sent once into one of two slots of the other rank."""

    def __init__(self, model: FSDPModule, device: torch.device):
        params = [group.fsdp_params for group in param_groups(model)]
        self._slot_numel = max(
            sum(one._sharded_param_data.numel() + ALIGN for one in some) for some in params
        )
        dtype = params[0][0]._sharded_param_data.dtype
        self._buffer = SharedBuffer(2 * self._slot_numel, dtype, device)
        self._num_called = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an output; the input, which is twice as large as that, is not needed."""
        self._num_called += 1
        is_input = self._num_called % 2 == 1
        return torch.empty(0 if is_input else size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **_: Any) -> None:  # pyright: ignore
        rank, places = dist.get_rank(), Places()
        places.numel = self._slot_numel * (self._num_called // 2 % 2)
        gradients: list[Tensor] = input_tensor.gradients  # pyright: ignore
        where = [places.take(one.numel() // 2) for one in gradients]
        halves = [one.reshape(2, -1) for one in gradients]
        for half, place in zip(halves, where, strict=True):
            self._buffer.other[place].copy_(half[1 - rank], non_blocking=True)
        # The other rank, which is here too, has read what came into the other slot.
        self._buffer.barrier()
        begin = 0
        for half, place in zip(halves, where, strict=True):
            numel = place.stop - place.start
            torch.lerp(half[rank], self._buffer.own[place], 0.5, out=output_tensor[begin : begin + numel])
            begin += numel


def param_groups(model: Any) -> list[Any]:
    """Return the parameter groups of a model's FSDP2 modules, each once."""
    found: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            found |= {id(group): group for group in groups if group is not None}
    return list(found.values())


@contextmanager
def peer_copies(shards: SharedShards, reduce_scatter: PeerReduceScatter, model: FSDPModule) -> Iterator[None]:
    """Let the model's steps exchange parameters and gradients by copies. Blocks must be gathered ahead."""

    def gather(params: Any, group: Any, async_op: bool, copy_in: Any, stream: Any, *_: Any) -> Any:
        return shards.gather(params, stream)

    def copy_out(result: Any, params: Any, group: Any) -> None:
        handle = torch.cuda if result[0].device.type == "cuda" else torch.cpu
        handle.current_stream().wait_event(result.all_gather_event)

    def copy_in(gradients: list[Tensor], buffer: Any, world_size: int) -> None:
        buffer.gradients = list(gradients)  # FSDP2 keeps the buffer until the reduction is done.

    groups = param_groups(model)
    before = [group._reduce_scatter_comm for group in groups]
    with ExitStack() as stack:
        stack.enter_context(patch.object(_fsdp_param_group, "foreach_all_gather", gather))
        stack.enter_context(patch.object(_fsdp_param_group, "foreach_all_gather_copy_out", copy_out))
        stack.enter_context(patch.object(_fsdp_collectives, "foreach_reduce_scatter_copy_in", copy_in))
        for group in groups:
            group._reduce_scatter_comm = reduce_scatter
        try:
            yield
        finally:
            for group, comm in zip(groups, before, strict=True):
                group._reduce_scatter_comm = comm
