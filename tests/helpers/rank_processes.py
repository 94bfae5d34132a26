"""Processes of one gloo group, in which tests run functions."""

from __future__ import annotations

import gc
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from trainfit.kernels.custom_op import interprets_triton
from trainfit.kernels.flash_attention.dispatch import machine_of
from trainfit.measurement.process import die_with_parent
from trial_start import processes


class Ranks:
    """``world_size`` processes of one gloo group; each keeps its imports from one call to the next."""

    def __init__(self, world_size: int):
        context = processes()
        self._folder = tempfile.TemporaryDirectory()
        store = Path(self._folder.name) / "store"
        self._pipes, self._processes = [], []
        for rank in range(world_size):
            here, there = context.Pipe()
            arguments = (there, store, rank, world_size, os.getpid())
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Return what the function returns on each rank; an exception fails with its traceback."""
        for pipe in self._pipes:
            pipe.send((function, args, kwargs))
        answers = [pipe.recv() for pipe in self._pipes]
        for rank, (failure, _) in enumerate(answers):
            assert failure is None, f"rank {rank}: {failure}"
        return [result for _, result in answers]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()


def _serve(pipe: Any, store: Path, rank: int, world_size: int, parent: int) -> None:
    die_with_parent(parent)
    gc.freeze()  # A collection that visited the parent's objects would copy all of its memory.
    torch.manual_seed(0)
    # Whole steps run attention in PyTorch: Triton's interpreter would take ten times as long.
    os.environ.pop("TRITON_INTERPRET", None)
    interprets_triton.cache_clear()
    machine_of.cache_clear()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(store), world_size), rank=rank, world_size=world_size
    )
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            answer = (None, function(*args, **kwargs))
        except BaseException:
            answer = (traceback.format_exc(), None)
        pipe.send(answer)
