"""Process groups in user code: one rank runs; several are refused instead of hanging."""

import importlib
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch

from trainfit.spec.errors import InputError
from trainfit.virtual.trace.exclusive import replaced

REMEDY = (
    "run the traced callable as one rank: WORLD_SIZE=1 or world_size=1, and no launcher of several processes"
)


@contextmanager
def one_rank() -> Iterator[None]:
    """Refuse a second process, and destroy a process group that the code leaves.

    Raises:
        InputError: inside, for more than one rank, ``torch.multiprocessing.spawn`` or
            DistributedDataParallel.
    """
    dist: Any = torch.distributed
    if not dist.is_available():
        yield
        return
    c10d = importlib.import_module("torch.distributed.distributed_c10d")
    spawn = importlib.import_module("torch.multiprocessing.spawn")
    had_group = dist.is_initialized()
    with ExitStack() as stack:
        # Module globals of init_process_group.
        stack.enter_context(replaced(c10d, "rendezvous", _checked_rendezvous(c10d.rendezvous)))
        stack.enter_context(
            replaced(c10d, "_new_process_group_helper", _checked_group(c10d._new_process_group_helper))
        )
        # Created directly, a store waits for its clients.
        stack.enter_context(replaced(dist.TCPStore, "__init__", _checked_store(dist.TCPStore.__init__)))
        stack.enter_context(replaced(spawn, "start_processes", _refuse_processes))
        stack.enter_context(
            replaced(torch.nn.parallel.DistributedDataParallel, "__init__", _refuse_data_parallel)
        )
        try:
            yield
        finally:
            if dist.is_initialized() and not had_group:
                dist.destroy_process_group()


def _checked_rendezvous(original: Any) -> Any:
    def rendezvous(url: Any, rank: int = -1, world_size: int = -1, **kwargs: Any) -> Any:
        _refuse_ranks(_world_size(str(url), world_size))
        return original(url, rank, world_size, **kwargs)

    return rendezvous


def _checked_store(original: Any) -> Any:
    def init(
        self: Any, host_name: str, port: int, world_size: int | None = None, *args: Any, **kwargs: Any
    ) -> None:
        _refuse_ranks(world_size or 1)
        original(self, host_name, port, world_size, *args, **kwargs)

    return init


def _world_size(url: str, given: int) -> int:
    """Return the number of ranks as PyTorch's rendezvous finds it: the argument, the URL, the environment."""
    named = re.search(r"[?&]world_size=(\d+)", url)
    if named:
        return int(named[1])
    if given == -1 and url.startswith("env://"):
        value = os.environ.get("WORLD_SIZE", "")
        return int(value) if value.isdecimal() else given
    return given


def _checked_group(original: Any) -> Any:
    def new_group(
        group_size: int, group_rank: int, ranks: Any, backend: Any, *args: Any, **kwargs: Any
    ) -> Any:
        _refuse_ranks(group_size)
        return original(group_size, group_rank, ranks, _on_host(backend), *args, **kwargs)

    return new_group


def _on_host(backend: Any) -> Any:
    """Return Gloo for NCCL, which needs a GPU; one rank does not communicate."""
    c10d = importlib.import_module("torch.distributed.distributed_c10d")
    return c10d.Backend("gloo") if str(backend) == "nccl" else backend


def _refuse_ranks(number: int) -> None:
    if number > 1:
        raise InputError(
            f"a process group of {number} ranks: a trace follows one process on one GPU",
            REMEDY,
            field="step",
            value=f"world_size={number}",
        )


def _refuse_processes(*_: Any, **__: Any) -> NoReturn:
    raise InputError(
        "torch.multiprocessing starts processes: a trace follows one process on one GPU",
        "call the function of one rank itself in the traced callable",
        field="step",
        value="torch.multiprocessing.spawn",
    )


def _refuse_data_parallel(*_: Any, **__: Any) -> NoReturn:
    raise InputError(
        "its buckets and reductions are not modelled yet",
        "train the module itself in the traced callable",
        field="step",
        value="DistributedDataParallel",
    )
