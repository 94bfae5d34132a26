"""Rank 0 of a process group without other processes: collectives move nothing and return at once.

PyTorch's distributed code runs unchanged. Uneven shards make the first rank's the largest, so its peak is the
highest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from trainfit.catalog.collectives import kinds_by_schema
from trainfit.ledger.ledger import Collective
from trainfit.spec.errors import InputError
from trainfit.virtual import torch_internals
from trainfit.virtual.trace.exclusive import replaced
from trainfit.virtual.trace.observer import Observer, StreamPools
from trainfit.virtual.trace.tracer import Tracer

PROPAGATE = "_propagate_tensor_meta_non_cached"
"""DTensor's function that runs an operation on whole tensors to find the shape of its result."""
RESIZED = "resized"
"""Name of the allocation that replaces a storage which is resized in place."""


@contextmanager
def fake_group(dimensions: dict[str, int]) -> Iterator[DeviceMesh]:
    """Enter as rank 0 of a mesh of these sizes. Enter it before any fake mode: meshes read their ranks.

    Raises:
        InputError: the process already is a rank of a process group.
    """
    torch_internals.require("ranks")
    if dist.is_initialized():
        raise InputError(
            "this process is a rank of a process group already",
            "predict for several GPUs in a process of its own",
            field="hardware.count",
        )
    names, shape = tuple(dimensions), tuple(dimensions.values())
    world_size = torch.Size(shape).numel()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield init_device_mesh("cpu", shape, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


class Collectives(Observer):
    """Records collectives with their bytes and group.

    Args:
        pools: number the streams; the computation may wait for a collective on the first one.
    """

    def __init__(self, pools: StreamPools):
        self._pools = pools

    def communicates(self, func: Any, args: Any) -> None:
        kind = kinds_by_schema().get(func._schema.name)
        if kind is None:
            return
        is_functional = func.namespace != "c10d"
        group = _named(args) if is_functional else _group(args)
        if group is None or group.size() == 1:
            return
        ranks = dist.get_process_group_ranks(group)
        num_bytes = max(sum(t.nbytes for t in _tensors(arg)) for arg in args)
        if is_functional and kind.gathers:
            num_bytes *= len(ranks)  # Only the input is an argument.
        is_asynchronous = not any(arg is False for arg in args)  # A default True is left out.
        live = self.tracer.live
        live.ledger.collectives.append(
            Collective(
                kind.name,
                live.segment,
                live.current_group,
                len(live.ledger.ops) - 1,
                num_bytes,
                num_ranks=len(ranks),
                span=ranks[-1] - ranks[0] + 1,
                is_synchronous=is_functional or (self._pools.on_first_stream() and not is_asynchronous),
            )
        )


def rank_observers(current_stream: Callable[[], Any] = torch.cpu.current_stream) -> tuple[Observer, ...]:
    """Return the observers that record a rank's collectives, and the streams of its allocations.

    Allocations on streams other than the first belong to the category communication.
    """
    pools = StreamPools(current_stream, "communication")
    return pools, Collectives(pools)


@contextmanager
def one_rank(tracer: Tracer) -> Iterator[None]:
    """Let distributed code run on a tracer that has ``rank_observers``.

    - A storage that is resized in place is recorded as a free and an allocation of the category
    communication: so FSDP2 frees and takes back unsharded parameters.
    - Operations that DTensor runs only to find the shape of a result are not recorded.
    - FSDP2's collectives are recorded with their number of parameters.
    - DTensor's cached sharding rules are dropped before and after: each holds the first mesh that it was used
      with, which stands for a real mesh of the same size in this process, but is always of rank 0.
    """
    live = tracer.live
    resize = torch.UntypedStorage.resize_
    propagate = getattr(ShardingPropagator, PROPAGATE)

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        index = live.index_of_storage(storage)
        result = resize(storage, size)
        if index is not None:
            live.categorise("communication", (live.resize(storage, index, size, RESIZED),))
        return result

    def unrecorded(self: Any, schema: Any) -> Any:
        with _disable_current_modes():
            return propagate(self, schema)

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(fsdp_params: list[Any], *args: Any) -> Any:
            first, number = len(live.ledger.collectives), len(fsdp_params)
            result = function(fsdp_params, *args)
            for index, one in enumerate(live.ledger.collectives[first : first + 1], first):
                live.ledger.collectives[index] = one._replace(num_parameters=number)
            return result

        return call

    _clear_sharding_caches()
    with ExitStack() as stack:
        for name in ("foreach_all_gather", "foreach_reduce"):
            function = counted(getattr(_fsdp_param_group, name))
            stack.enter_context(replaced(_fsdp_param_group, name, function))
        stack.callback(_clear_sharding_caches)
        stack.enter_context(replaced(torch.UntypedStorage, "resize_", resized))
        stack.enter_context(replaced(ShardingPropagator, PROPAGATE, unrecorded))
        yield


def _group(args: Any) -> dist.ProcessGroup | None:
    """Return the process group that an operation's arguments box."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(arg)
            except RuntimeError:
                continue
    return None


def _named(args: Any) -> dist.ProcessGroup | None:
    """Return the process group among a functional collective's arguments, given as a group or by name."""
    group = next((arg for arg in reversed(args) if isinstance(arg, str | dist.ProcessGroup)), None)
    if not isinstance(group, str):
        return group
    return distributed_c10d._resolve_process_group(group)  # pyright: ignore[reportArgumentType]


def _tensors(arg: Any) -> list[torch.Tensor]:
    if isinstance(arg, torch.Tensor):
        return [arg]
    return [t for one in arg for t in _tensors(one)] if isinstance(arg, list | tuple) else []


def _clear_sharding_caches() -> None:
    """Clear DTensor's caches as ``torch.distributed.tensor.debug``, which imports the compiler (0.35 s)."""
    dispatcher: Any = DTensor._op_dispatcher
    dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
