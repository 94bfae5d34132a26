"""Process groups in user code: one rank runs; several are refused instead of hanging."""

import importlib
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from trainfit.spec.errors import InputError
from trainfit.virtual.trace.exclusive import replaced

REMEDY = (
    "run the traced callable as one rank: WORLD_SIZE=1 or world_size=1, and no launcher of several processes"
)


@contextmanager
def one_rank() -> Iterator[None]:
    """Refuse several ranks or processes, and destroy a process group that the code leaves."""
    dist: Any = torch.distributed
    if not dist.is_available():
        yield
        return
    c10d = importlib.import_module("torch.distributed.distributed_c10d")
    spawn = importlib.import_module("torch.multiprocessing.spawn")
    rendezvous, new_group, init_store = (
        c10d.rendezvous,
        c10d._new_process_group_helper,
        dist.TCPStore.__init__,
    )

    def checked_rendezvous(url: Any, rank: int = -1, world_size: int = -1, **kwargs: Any) -> Any:
        _refuse_ranks(_world_size(str(url), world_size))
        return rendezvous(url, rank, world_size, **kwargs)

    def checked_group(
        group_size: int, group_rank: int, ranks: Any, backend: Any, *args: Any, **kwargs: Any
    ) -> Any:
        _refuse_ranks(group_size)
        # NCCL needs a GPU; one rank does not communicate.
        backend = c10d.Backend("gloo") if str(backend) == "nccl" else backend
        return new_group(group_size, group_rank, ranks, backend, *args, **kwargs)

    def checked_store(
        self: Any, host_name: str, port: int, world_size: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        _refuse_ranks(world_size or 1)
        init_store(self, host_name, port, world_size, *args, **kwargs)

    def refused_processes(*_: Any, **__: Any) -> None:
        raise InputError(
            "torch.multiprocessing starts processes: a trace follows one process on one GPU",
            "call the function of one rank itself in the traced callable",
            field="step",
            value="torch.multiprocessing.spawn",
        )

    def refused_data_parallel(*_: Any, **__: Any) -> None:
        raise InputError(
            "its buckets and reductions are not modelled yet",
            "train the module itself in the traced callable",
            field="step",
            value="DistributedDataParallel",
        )

    had_group = dist.is_initialized()
    with ExitStack() as stack:
        for owner, name, function in (
            (c10d, "rendezvous", checked_rendezvous),
            (c10d, "_new_process_group_helper", checked_group),
            (dist.TCPStore, "__init__", checked_store),  # Created directly, a store waits for its clients.
            (spawn, "start_processes", refused_processes),
            (torch.nn.parallel.DistributedDataParallel, "__init__", refused_data_parallel),
        ):
            stack.enter_context(replaced(owner, name, function))
        try:
            yield
        finally:
            if dist.is_initialized() and not had_group:
                dist.destroy_process_group()


def _world_size(url: str, given: int) -> int:
    """Return the number of ranks as PyTorch's rendezvous finds it: the argument, the URL, the environment."""
    named = re.search(r"[?&]world_size=(\d+)", url)
    if named:
        return int(named[1])
    value = os.environ.get("WORLD_SIZE", "")
    from_environment = given == -1 and url.startswith("env://") and value.isdecimal()
    return int(value) if from_environment else given


def _refuse_ranks(number: int) -> None:
    if number > 1:
        raise InputError(
            f"a process group of {number} ranks: a trace follows one process on one GPU",
            REMEDY,
            field="step",
            value=f"world_size={number}",
        )
