"""The trial of a recipe for several GPUs: a launcher, and one process a GPU.

The launcher imports torch, hosts the ranks' TCPStore and starts the ranks in its own process group, as forks
where CUDA allows it. Rank i is a trial of the folder FOLDER/rank-i with torchrun's environment variables, so
it measures and keeps its own result as the trial of one GPU does (trial.py). The launcher combines the
results. When a rank fails, the launcher ends the others, and its result names the rank and the reason.
"""

import json
import os
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainfit.measurement.fork_server import ready_to_fork
from trainfit.measurement.machine import check_processes
from trainfit.measurement.process import LOG, StoppedProcesses, is_exiting
from trainfit.measurement.trial import run_trial
from trainfit.measurement.trial_files import (
    ERROR,
    REQUEST,
    RESULT,
    ResultFile,
    TrialRequest,
    ended_by_storage,
    opened,
    refused,
)
from trainfit.spec.errors import EXIT_BAD_INPUT, EXIT_IO, InputError
from trainfit.spec.files import write_text
from trainfit.spec.parsing.parse import parse
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Loop, Measurement, RankMeasurement

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

RANK = "trainfit.measurement.ranks"  # The module whose main(folder) runs one rank
HOST = "127.0.0.1"
FAILED = "failed.json"  # When an exception ended the rank, on the machine's monotonic clock, in seconds
POLL_S = 0.05
STOPPED_S = 20.0  # A rank that is stopped (SIGSTOP) for so long ends the trial: the others wait for it
GRACE_S = 2.0  # Time for the other ranks to report that they ran out of memory too
OF_HIGHEST = (
    "phases", "breakdown", "peak_allocated_bytes", "peak_reserved_bytes", "peak_device_bytes", "device_bytes",
    "params", "trainable_params", "environment",
)  # fmt: skip
"""Fields that a Measurement of several ranks has from the rank with the highest peak."""


def launch(folder: Path) -> int:
    """Run every rank of the trial of ``folder``, combine their results and return the exit code."""
    request, result = opened(folder)
    try:
        return _launched(folder, request, result)
    except InputError as error:
        return refused(folder, error)


def _launched(folder: Path, request: TrialRequest, result: ResultFile) -> int:
    """Return the exit code of a launch.

    Raises:
        InputError: the recipe cannot be assembled, or this machine has too few GPUs.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # Importing leaves CUDA untouched.
    import torch.distributed as dist

    from trainfit.techniques import registry

    recipe = request.recipe
    registry.check(recipe)
    devices = _devices(request.device, recipe.hardware.count)
    start = ready_to_fork(devices[0].partition(":")[0])
    server = socket.create_server((HOST, 0))
    ranks = [_start(folder, request, device, server, start) for device in devices]
    # After the forks, because the store runs a thread. Ranks that come earlier wait in the socket's queue.
    port = server.getsockname()[1]
    store = dist.TCPStore(
        HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach()
    )
    try:
        _watch(ranks, lambda: result.update(**combined(recipe, [rank.measurement for rank in ranks])))
    finally:
        for rank in ranks:
            rank.end()
    del store
    return _concluded(folder, recipe, ranks, result)


def _devices(device: str, count: int) -> list[str]:
    """Return each rank's device.

    Raises:
        InputError: too few GPUs, or one GPU was named.
    """
    import torch

    if device.startswith("cuda:"):
        problem, remedy = f"{device} is one GPU, and the recipe is for {count}", "use device cuda"
        raise InputError(problem, remedy, field="device", value=device)
    found = torch.cuda.device_count()
    if device == "cpu" or (device == "auto" and not found):
        check_processes(count, "hardware.count")
        return ["cpu"] * count
    if found < count:
        raise InputError(
            f"the recipe is for {count} GPUs, and this process sees {found}",
            f"use a machine with {count} GPUs, device cpu, or hardware.count: {max(found, 1)}",
            field="hardware.count",
            value=count,
        )
    return [f"cuda:{index}" for index in range(count)]


@dataclass
class _Rank:
    """A rank's process, as the launcher sees it."""

    number: int
    folder: Path
    pid: int
    seen_s: float  # When it was last seen running
    code: int | None = None  # Exit code, or minus the signal; None while it runs

    def poll(self) -> None:
        if self.code is not None:
            return
        now_s = time.monotonic()
        # Before the wait: a process that ends between the two has ended.
        exiting = is_exiting(self.pid)
        ended, status = os.waitpid(self.pid, os.WNOHANG)
        if ended:
            self.code = os.waitstatus_to_exitcode(status)
        elif not exiting:
            self.seen_s = now_s

    def end(self) -> None:
        """End the process if it still runs."""
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)

    @property
    def measurement(self) -> Measurement:
        return parse(Measurement, json.loads((self.folder / RESULT).read_text()))

    @property
    def ended_badly(self) -> bool:
        return self.code is not None and (self.code != 0 or self.measurement.status != "done")

    @property
    def failed_s(self) -> float:
        """When it ended, or the exception that ended it was raised."""
        noted = self.folder / FAILED
        return json.loads(noted.read_text()) if noted.is_file() else self.seen_s


def _start(
    folder: Path, request: TrialRequest, device: str, server: socket.socket, start: Callable[..., int]
) -> _Rank:
    count, number = request.recipe.hardware.count, len(list(folder.glob("rank-*")))
    place = folder / f"rank-{number}"
    place.mkdir()
    nothing = Measurement(
        recipe_id=request.recipe.id, status="crashed", message="ended before it began",
        environment=request.environment,
    )  # fmt: skip
    write_text(place / RESULT, nothing.model_dump_json())
    write_text(place / REQUEST, request.model_copy(update={"device": device}).model_dump_json())
    os.environ |= {
        "RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": HOST, "MASTER_PORT": str(server.getsockname()[1]),
        # As under torchrun: the store is the launcher's, and rank 0 starts none.
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip
    return _Rank(number, place, start(place, RANK, own_group=False), time.monotonic())


def _watch(ranks: Sequence[_Rank], on_change: Callable[[], None]) -> None:
    """Wait until all ranks have ended, or until GRACE_S after one has failed."""
    deadline, stopped = float("inf"), StoppedProcesses(STOPPED_S)
    changed: list[int] = []
    while any(rank.code is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(POLL_S)
        for rank in ranks:
            rank.poll()
        pid = stopped.first(rank.pid for rank in ranks if rank.code is None)
        for rank in ranks:
            if rank.pid == pid:
                result = ResultFile(rank.folder / RESULT)
                was_in = result.measurement.message
                result.update(message=f"{was_in}; process {pid} had been stopped for {STOPPED_S:.0f} s")
                os.kill(rank.pid, signal.SIGKILL)
        if any(rank.ended_badly for rank in ranks):
            deadline = min(deadline, time.monotonic() + GRACE_S)
        now = [(rank.folder / RESULT).stat().st_mtime_ns for rank in ranks]
        if now != changed:
            changed = now
            on_change()


def _concluded(folder: Path, recipe: Recipe, ranks: Sequence[_Rank], result: ResultFile) -> int:
    """Write the result of all ranks, or the reason why the first one failed; return the exit code."""
    measurements = [rank.measurement for rank in ranks]
    known = combined(recipe, measurements)
    bad = sorted((rank for rank in ranks if rank.ended_badly), key=lambda rank: rank.failed_s)
    if not bad:
        result.update(**known, status="done")
        return 0
    for rank in bad:
        if (rank.folder / ERROR).is_file():
            shutil.copy(rank.folder / ERROR, folder / ERROR)
            return EXIT_BAD_INPUT
        if rank.code == EXIT_IO:
            shutil.copy(rank.folder / LOG, folder / LOG)
            return EXIT_IO
    out_of_memory = [rank for rank in ranks if measurements[rank.number].status == "out-of-memory"]
    first = (out_of_memory or bad)[0]
    found = measurements[first.number]
    result.update(**known | {"status": found.status, "message": f"rank {first.number}: {found.message}"})
    if out_of_memory:
        return 0
    shutil.copy(first.folder / LOG, folder / LOG)  # Its last lines of output have the reason.
    assert first.code is not None
    if first.code < 0:  # End as the rank did: the signal is part of the result.
        with suppress(OSError):
            signal.signal(-first.code, signal.SIG_DFL)
        os.kill(os.getpid(), -first.code)
    return first.code


def combined(recipe: Recipe, ranks: Sequence[Measurement]) -> dict[str, Any]:
    """Return the fields of a Measurement of all ranks.

    Memory is of the rank with the highest peak, time of the slowest one, and losses are the ranks' mean.
    """
    highest = max(ranks, key=lambda one: (one.peak_allocated_bytes or 0, one.peak_device_bytes or 0))
    slowest = max(ranks, key=lambda one: one.step_s or 0.0)
    stages = list(dict.fromkeys(one.message for one in ranks))
    by_rank = (f"rank {number}: {one.message}" for number, one in enumerate(ranks) if one.message)
    tokens = recipe.step_tokens
    # Ranks wait for each other: one throttled GPU invalidates the time of all.
    throttled = {reason for one in ranks for reason in one.environment.throttled}
    environment = highest.environment.model_copy(update={"throttled": tuple(sorted(throttled))})
    step_s = None if environment.held_back else slowest.step_s
    return {
        **{name: getattr(highest, name) for name in OF_HIGHEST},
        "environment": environment,
        "message": stages[0] if len(stages) == 1 else "; ".join(by_rank),
        "step_times": None if step_s is None else slowest.step_times,
        "step_s": step_s,
        "tokens_per_s": tokens / step_s if step_s else None,
        "loop": _loop(highest, ranks),
        "busy": slowest.busy,
        "memory_access": slowest.memory_access,
        "losses": tuple(sum(some) / len(some) for some in zip(*(one.losses for one in ranks), strict=False)),
        "ranks": tuple(
            RankMeasurement(**{name: getattr(one, name) for name in RankMeasurement.model_fields})
            for one in ranks
        ),
    }


def _loop(highest: Measurement, ranks: Sequence[Measurement]) -> Loop | None:
    """Return a policy's loop: memory of the rank with the highest peak, time of the slowest one."""
    loops = [one.loop for one in ranks if one.loop is not None]
    if highest.loop is None or len(loops) < len(ranks):
        return None
    slowest = {
        name: max(filter(None, times), key=lambda one: one.seconds, default=None)
        for name, times in (
            ("longest", [one.longest for one in loops]),
            ("expected", [one.expected for one in loops]),
        )
    }
    return highest.loop.model_copy(update=slowest)


class Rank:
    """This process as a rank of the trial: its mesh, and a barrier on the host."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._num_aligned = 0

    def join(self, recipe: Recipe, device: "torch.device") -> "DeviceMesh":
        """Join the process group and return the mesh of the recipe's ranks."""
        import torch
        import torch.distributed as dist

        from trainfit.parallel.processes import process_group

        if device.type == "cpu":  # The ranks share the processor.
            torch.set_num_threads(max(1, torch.get_num_threads() // recipe.hardware.count))
        mesh = self._stack.enter_context(process_group(recipe.mesh, device))
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False)
        return mesh

    def align(self, device: "torch.device") -> None:
        """Wait until every rank's GPU is idle. NCCL's own barrier would allocate memory on the device."""
        import torch

        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._num_aligned += 1
        key = f"trainfit aligned {self._num_aligned}"
        if self._store.add(key, 1) == int(os.environ["WORLD_SIZE"]):
            self._store.set(f"{key} all", "")
        self._store.wait([f"{key} all"], timedelta(days=1))  # The launcher ends this rank if another ends.

    def leave(self) -> None:
        """Leave the process group."""
        self._stack.close()


def main(folder: Path) -> int:
    """Run the rank of ``folder``. The process ends here: a group that lost a rank cannot be left in order."""
    code = 1
    try:
        code = ended_by_storage(lambda: _run(folder))
    except BaseException:
        write_text(folder / FAILED, json.dumps(time.monotonic()))
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(folder: Path) -> int:
    rank = Rank()
    code = run_trial(folder, rank)
    if code == 0 and parse(Measurement, json.loads((folder / RESULT).read_text())).status == "done":
        rank.leave()
    return code
