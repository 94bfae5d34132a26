"""Process groups in user code traced for one GPU: one rank runs; several are refused instead of hanging."""

import importlib
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from trainfit.spec.errors import InputError
from trainfit.virtual.trace.exclusive import replaced

REMEDY = "trace it as rank 0 of N ranks: --world-size N (trainfit.trace: world_size=N)"


@contextmanager
def single_rank() -> Iterator[None]:
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
        _refuse_ranks(world_size_of(str(url), world_size))
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
            "torch.multiprocessing starts processes: a trace follows one",
            REMEDY,
            field="step",
            value="torch.multiprocessing.spawn",
        )

    had_group = dist.is_initialized()

    def refused_data_parallel(*_: Any, **__: Any) -> None:
        raise InputError(
            "data parallel training on one rank without --world-size",
            REMEDY,
            field="step",
            value="DistributedDataParallel",
        )

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


def world_size_of(url: str, given: int) -> int:
    """Return the number of ranks as PyTorch's rendezvous finds it: the argument, the URL, the environment."""
    named = re.search(r"[?&]world_size=(\d+)", url)
    if named:
        return int(named[1])
    value = os.environ.get("WORLD_SIZE", "")
    from_environment = given == -1 and url.startswith("env://") and value.isdecimal()
    return int(value) if from_environment else given


def _refuse_ranks(number: int) -> None:
    if number == -1:
        raise InputError(
            "a process group of unknown size: neither the code nor WORLD_SIZE names it",
            REMEDY,
            field="step",
            value="init_process_group",
        )
    if number > 1:
        raise InputError(
            f"a process group of {number} ranks, without --world-size",
            REMEDY.replace("N", str(number)),
            field="step",
            value=f"world_size={number}",
        )
