"""Rank 0 of several in user code, as under torchrun: every process group is virtual, whatever its backend."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as distributed_checkpoint
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._fully_shard import _fsdp_init, _fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor, _op_schema, _random
from torch.nn.modules._functions import SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainfit.spec.errors import InputError
from trainfit.user.placement import CUDA, device_of
from trainfit.user.process_groups import world_size_of
from trainfit.user.steps import StepFollower
from trainfit.user.tracer import UserTracer
from trainfit.virtual.cluster.ddp import FirstBuckets, ddp_on_fakes
from trainfit.virtual.cluster.rank import one_rank, rank_observers
from trainfit.virtual.trace.exclusive import replaced
from trainfit.virtual.trace.host_tensors import VALUE, carried_values, is_host, on_host
from trainfit.virtual.trace.observer import Observer

STATES = "_get_managed_states"  # Returns the parameters and buffers that fully_shard moves to the GPU
BETWEEN_TWO = ("c10d::send", "c10d::recv_", "c10d::recv_any_source_")
"""Operations between two ranks, which are refused because only one rank is traced."""
Objects = list[Any]
Replacement = tuple[Any, str, Any]  # Owner, name and the function in place of it


def set_environment(num_ranks: int, local_ranks: int) -> None:
    """Set the variables of torchrun for rank 0."""
    values = {
        "RANK": 0, "LOCAL_RANK": 0, "GROUP_RANK": 0, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": local_ranks,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500,
    }  # fmt: skip
    os.environ.update({name: str(value) for name, value in values.items()})


@contextmanager
def virtual_rank(
    num_ranks: int, local_ranks: int, tracer: UserTracer, steps: StepFollower
) -> Iterator[FirstBuckets]:
    """Run user code as rank 0 of ``num_ranks``, and destroy the process groups that it leaves."""
    if dist.is_initialized():
        raise InputError(
            "this process is a rank of a process group already",
            "trace for several GPUs in a process of its own",
            field="world_size",
            value=num_ranks,
        )
    with ExitStack() as stack:
        enter = stack.enter_context
        set_environment(num_ranks, local_ranks)  # The end of the trace restores them.
        stack.callback(setattr, sys, "excepthook", sys.excepthook)
        enter(torch._dynamo.config.patch(optimize_ddp=False))
        for owner, name, function in (
            *_of_groups(num_ranks, tracer.notes),
            *_of_checkpoints(tracer.notes, steps),
            *_of_dtensor(tracer),
            (SyncBatchNorm, "forward", staticmethod(_with_all_counts(SyncBatchNorm.forward))),
            *_of_fsdp(steps),
        ):
            enter(replaced(owner, name, function))
        enter(one_rank(tracer))
        buckets = enter(ddp_on_fakes(tracer))
        try:
            yield buckets
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def observers(current_stream: Callable[[], Any]) -> tuple[Observer, ...]:
    """Return the observers of a traced rank of user code.

    Args:
        current_stream: returns the running stream of the virtual GPU.
    """
    return (*rank_observers(current_stream), _UserCollectives())


def data_ranks_of(num_ranks: int) -> Callable[[nn.Module], int]:
    """Return a function that returns how many ranks have inputs of their own for a module.

    These are the ranks of DDP's group or of FSDP2's mesh; 1 where its parameters are DTensors by tensor
    parallelism alone.
    """

    def data_ranks(module: nn.Module) -> int:
        for each in module.modules():
            if isinstance(each, DistributedDataParallel):
                group: Any = each.process_group
                return group.size()
            state: Any = each._get_fsdp_state() if isinstance(each, FSDPModule) else None
            if state is not None and state._fsdp_param_group is not None:
                return state._fsdp_param_group.mesh_info.mesh.size()
        return 1 if any(isinstance(p, DTensor) for p in module.parameters()) else num_ranks

    return data_ranks


def _of_groups(num_ranks: int, notes: set[str]) -> list[Replacement]:
    # ``torch.multiprocessing.spawn`` is the function.
    spawn = importlib.import_module("torch.multiprocessing.spawn")
    return [
        (torch._C, "_get_accelerator", lambda: torch.device(CUDA.type)),
        (c10d, "_get_default_timeout", lambda backend: c10d.default_pg_timeout),
        (c10d, "rendezvous", _rendezvous(num_ranks)),
        (c10d, "_new_process_group_helper", _new_group(num_ranks)),
        (dist.TCPStore, "__init__", _refused_store),
        (dist.Work, "is_completed", lambda work: True),
        (spawn, "start_processes", _run_first),
        *((owner, name, function) for name, function in _OBJECTS.items() for owner in (c10d, dist)),
    ]


def _of_checkpoints(notes: set[str], steps: StepFollower) -> list[Replacement]:
    def nothing(state: Any) -> None: ...

    return [
        (distributed_checkpoint, name, _noting(notes, note, nothing if name == "load" else steps.saves))
        for name, note in _CHECKPOINTS.items()
    ]


def _of_dtensor(tracer: UserTracer) -> list[Replacement]:
    tracker, device = _random.OffsetBasedRNGTracker, torch.Tensor.device
    seen = property(lambda self: device.__get__(self) if tracer.is_inside else device_of(self))
    return [
        # Draw random numbers as a single rank does: they are not computed, so no shard needs an offset.
        (_random, "_rng_tracker", None),
        (tracker, "__init__", _undistributed),
        (tracker, "_distribute_region", _unchanged_region),
        (tracker, "distribute_region_enabled", property(lambda self: False, lambda self, value: None)),
        # Needed where no function mode is entered, as in the hooks of saved tensors.
        (DTensor, "device", seen),
        (_op_schema, "_rebuild_tensor_from_dtensor_meta", _whole_tensor),
    ]


def _of_fsdp(steps: StepFollower) -> list[Replacement]:
    # Which of them moves parameters and buffers depends on PyTorch's version.
    modules = [module for module in (_fsdp_init, _fully_shard) if hasattr(module, STATES)]
    return [
        (FullyShardedDataParallel, "__init__", _refused_fsdp1),
        (FSDPParam, "_init_sharded_param", _on_device(FSDPParam._init_sharded_param)),
        (FSDPParam, "init_unsharded_param", _unnoticed(FSDPParam.init_unsharded_param, steps)),
        *((module, STATES, _with_buffers_moved(getattr(module, STATES))) for module in modules),
    ]


def _undistributed(self: Any, device_mesh: Any, run_state_sync: bool = True) -> None:
    """Make DTensor's tracker of random states, whose constructor would read and broadcast the GPU's state."""


@contextmanager
def _unchanged_region(self: Any, spec: Any, generator: torch.Generator | None = None) -> Iterator[None]:
    """Draw numbers for a shard without a state of its own."""
    yield


def _with_all_counts(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let SyncBatchNorm keep the statistics of every rank, where it drops those of empty inputs."""

    def forward(*args: Any) -> Any:
        # As while a CUDA graph is captured, when values cannot be read either.
        with replaced(torch.cuda, "is_current_stream_capturing", lambda: True):
            return original(*args)

    return forward


def _rendezvous(num_ranks: int) -> Callable[..., Iterator[Any]]:
    def rendezvous(url: Any, rank: int = -1, world_size: int = -1, **_: Any) -> Iterator[Any]:
        yield FakeStore(), 0, _checked(world_size_of(str(url), world_size), num_ranks)

    return rendezvous


def _new_group(num_ranks: int) -> Callable[..., Any]:
    original = c10d._new_process_group_helper

    def new_group(size: int, rank: int, ranks: Any, backend: Any, store: Any, name: Any, **more: Any) -> Any:
        if not ranks:
            _checked(size, num_ranks)
        more.update(backend_options=None, device_id=None)
        group, store = original(
            size, 0 if not ranks else rank, ranks, c10d.Backend("fake"), store, name, **more
        )
        if group is not c10d.GroupMember.NON_GROUP_MEMBER:
            c10d._world.pg_map[group] = (backend, store)  # The result of get_backend.
        return group, store

    return new_group


def _checked(world_size: int, num_ranks: int) -> int:
    if world_size not in (-1, num_ranks):
        raise InputError(
            f"the code makes a process group of {world_size} ranks, the trace has {num_ranks}",
            f"trace it with --world-size {world_size} (trainfit.trace: world_size={world_size})",
            field="world_size",
            value=num_ranks,
        )
    return num_ranks


def _refused_store(*_: Any, **__: Any) -> None:
    raise InputError(
        "a TCPStore of several ranks waits for the others, which are not traced",
        "use torch.distributed.init_process_group in the traced code",
        field="step",
        value="torch.distributed.TCPStore",
    )


def _refused_fsdp1(*_: Any, **__: Any) -> None:
    raise InputError(
        "FSDP1 is not traced",
        "shard with torch.distributed.fsdp.fully_shard (accelerate: FSDP version 2)",
        field="step",
        value="FullyShardedDataParallel",
    )


class _UserCollectives(Observer):
    """Refuses communication between two ranks, and fills gathered tensors with values that are known."""

    def collective_begins(self, func: Any) -> None:
        if func._schema.name in BETWEEN_TWO:
            raise InputError(
                "communication between two ranks (send, receive) is not traced: only rank 0 runs",
                "trace code that communicates by collectives (DDP, FSDP2, tensor parallel)",
                field="step",
                value=func._schema.name.removeprefix("c10d::").rstrip("_"),
            )

    def communicates(self, func: Any, args: Any) -> None:
        """Let a gathered tensor carry rank 0's values for every rank if they are known, such as sizes."""
        if func._schema.name != "c10d::_allgather_base_":
            return
        out, part = args[:2]
        known = carried_values(part)
        if known is not None and part.numel():
            times, shape = out.numel() // part.numel(), out.shape
            setattr(out, VALUE, on_host(lambda: known.flatten().repeat(times).view(shape), (), {}))


def _run_first(fn: Callable[..., Any], args: tuple[Any, ...] = (), *_: Any, **__: Any) -> None:
    """Run the first process's function in this process, in place of ``torch.multiprocessing.spawn``."""
    fn(0, *args)


def _unnoticed(original: Callable[..., Any], steps: StepFollower) -> Callable[..., None]:
    """Hide gathered parameters, which are made anew from sharded ones, from the count of parameters."""

    def init(self: Any) -> None:
        with steps.ignored_parameters():
            original(self)

    return init


def _on_device(original: Callable[..., Any]) -> Callable[..., None]:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.offload_to_cpu:
            raise InputError(
                "FSDP2's offload of parameters to the host is not traced",
                "leave the offload policy out of the traced code",
                field="step",
                value="CPUOffloadPolicy",
            )
        original(self, *args, **kwargs)

    return init


def _whole_tensor(spec: Any) -> torch.Tensor:
    """Return a fake tensor for the shape of DTensor's result, on the CPU: PyTorch without CUDA needs it."""
    meta = spec.tensor_meta
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype)


def _with_buffers_moved(original: Callable[..., Any]) -> Callable[..., Any]:
    """Move buffers to the GPU before ``fully_shard`` would set their data, which are of another type."""

    def states(modules: Any, *args: Any) -> Any:
        for module in modules:
            for name, buffer in module.named_buffers(recurse=False):
                if is_host(buffer) and not buffer.is_meta:
                    module._buffers[name] = buffer.to(CUDA)
        return original(modules, *args)

    return states


def _noting(notes: set[str], note: str, on_state: Callable[[Any], None]) -> Callable[..., Future[None]]:
    """Return a function that adds a note in place of reading or writing a checkpoint."""

    def noted(state_dict: Any, *_: Any, **__: Any) -> Future[None]:
        notes.add(note)
        on_state(state_dict)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    return noted


_CHECKPOINTS = {
    "save": "torch.distributed.checkpoint.save wrote nothing: there are no values to keep",
    "async_save": "torch.distributed.checkpoint.async_save wrote nothing: there are no values to keep",
    "load": "torch.distributed.checkpoint.load read nothing: values are not computed",
}


def _gathered_everywhere(objects: Objects, mine: Any, group: Any = None) -> None:
    objects[:] = [mine] * len(objects)


def _gathered(mine: Any, objects: Objects | None = None, *_: Any, **__: Any) -> None:
    if objects is not None:
        objects[:] = [mine] * len(objects)


def _scattered(received: Objects, objects: Objects | None = None, *_: Any, **__: Any) -> None:
    received[0] = objects[0] if objects else None


_OBJECTS = {
    "all_gather_object": _gathered_everywhere,
    "gather_object": _gathered,
    "scatter_object_list": _scattered,
    "broadcast_object_list": lambda *_, **__: None,
}
"""Collectives of Python objects: every rank is assumed to have the object of rank 0."""
