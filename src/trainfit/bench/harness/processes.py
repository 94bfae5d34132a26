"""Run a function on every rank of a process group, one process a rank, and receive results as they are made.

NCCL on GPUs, a rank a GPU; gloo on CPUs. A rank that fails, dies or answers nothing ends all of them.
"""

import gc
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from trainfit.bench.harness.bench import failure_of
from trainfit.measurement.process import die_with_parent
from trainfit.spec.errors import InputError
from trainfit.virtual.forked import autograd_has_threads

PATIENCE_S = 120.0  # Longest wait for the next result of a rank
POLL_S = 1e-4
HEAD_START_NS = 2_000_000  # Time between the last rank's arrival and the common start
Work = Callable[..., Iterator[Any]]  # (rank, *arguments) -> results, equally many on every rank


@dataclass
class Rank:
    """One process of a group, as the function that it runs sees it."""

    number: int
    world_size: int
    device: torch.device
    store: dist.Store
    num_starts: int = 0

    def synchronize(self) -> None:
        """Wait until the device has finished all issued work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def start_together(self) -> None:
        """Return at the same time on all ranks, with idle devices.

        Unlike NCCL's barrier this allocates nothing on the device.
        """
        self.synchronize()
        self.num_starts += 1
        arrived, start = f"arrived {self.num_starts}", f"start {self.num_starts}"
        if self.store.add(arrived, 1) == self.world_size:
            self.store.add(start, time.monotonic_ns() + HEAD_START_NS)
        while not (at := self.store.add(start, 0)):
            time.sleep(POLL_S)
        while time.monotonic_ns() < at:
            pass


class RankError(RuntimeError):
    """A rank failed: which one and why."""


class Ranks:
    """Processes that run ``work``; they start with the first call of ``results``.

    Args:
        device_type: ``cuda`` or ``cpu``.
        work: a function of a module, called with the rank and ``arguments`` in each process.
    """

    def __init__(self, world_size: int, device_type: str, work: Work, *arguments: Any):
        self.world_size = world_size
        self.device_type = device_type
        self._work, self._arguments = work, arguments
        self._folder = tempfile.TemporaryDirectory(prefix="trainfit-ranks-")
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._failure: Exception | None = None

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        self._folder.cleanup()

    def results(self) -> list[Any]:
        """Return the next result of each rank.

        Raises:
            InputError: the machine has fewer GPUs than ranks.
            torch.OutOfMemoryError: a rank ran out of memory.
            RankError: a rank failed otherwise. Later calls raise the same.
        """
        if self._failure is not None:
            raise self._failure
        try:
            if not self._processes:
                self._start()
            return self._received()
        except Exception as error:
            self._failure = error
            self._end()
            raise

    def _start(self) -> None:
        if self.device_type == "cuda" and torch.cuda.device_count() < self.world_size:
            raise InputError(
                f"this machine has {torch.cuda.device_count()} GPUs", "use fewer processes",
                field="processes", value=self.world_size,
            )  # fmt: skip
        # A forked process needs no imports, but cannot use a GPU, or autograd's threads, as its parent has.
        can_fork = self.device_type != "cuda" and not autograd_has_threads()
        context = get_context("fork" if can_fork else "spawn")
        path = Path(self._folder.name, "store")
        for number in range(self.world_size):
            here, there = context.Pipe(duplex=False)
            arguments = (there, os.getpid(), number, self.world_size, self.device_type, str(path))
            process = context.Process(  # pyright: ignore[reportAttributeAccessIssue]
                target=_run, args=(*arguments, self._work, self._arguments), daemon=True
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def _received(self) -> list[Any]:
        found: dict[int, Any] = {}
        while len(found) < self.world_size:
            open_pipes = {pipe: number for number, pipe in enumerate(self._pipes) if number not in found}
            ready = wait(list(open_pipes), PATIENCE_S)
            if not ready:
                missing = ", ".join(map(str, sorted(open_pipes.values())))
                raise RankError(f"no answer from rank {missing} for {PATIENCE_S:.0f} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                number = open_pipes[pipe]
                try:
                    failure, found[number] = pipe.recv()
                except EOFError:
                    self._processes[number].join(1.0)
                    code = self._processes[number].exitcode
                    raise RankError(f"rank {number} ended with exit code {code}") from None
                if failure is not None:
                    status, message = failure
                    kind = torch.OutOfMemoryError if status == "out-of-memory" else RankError
                    raise kind(f"rank {number}: {message}")
        return [found[number] for number in range(self.world_size)]

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._pipes = []


def _run(
    pipe: Connection, parent: int, number: int, world_size: int, device_type: str, store_path: str,
    work: Work, arguments: tuple[Any, ...],
) -> None:  # fmt: skip
    """Run ``work`` as one rank; a failure is sent and the process waits to be killed.

    If it ended, other ranks would fail for want of it before the cause is received.
    """
    die_with_parent(parent)
    gc.freeze()  # A collection that visited the parent's objects would copy all of its memory.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent ends its ranks.
    try:
        rank = _joined(number, world_size, device_type, store_path)
        for result in work(rank, *arguments):
            pipe.send((None, result))
    except BaseException as error:
        with suppress(OSError):
            pipe.send((failure_of(error), None))
    while True:
        time.sleep(PATIENCE_S)


def _joined(number: int, world_size: int, device_type: str, store_path: str) -> Rank:
    device = torch.device(device_type, number) if device_type == "cuda" else torch.device("cpu")
    options: dict[str, Any] = {}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # Multicast over NVLink needs rights that containers often lack.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        options["device_id"] = device
    else:
        torch.set_num_threads(1)
    store = dist.FileStore(store_path, world_size)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", store=store, rank=number, world_size=world_size,
        timeout=timedelta(seconds=PATIENCE_S), **options,
    )  # fmt: skip
    return Rank(number, world_size, device, dist.PrefixStore("ranks", store))
