"""Start one process a GPU on this host and wait for all of them. Free of torch.

The processes are ranks as torchrun starts them: they find each other through ``RANK``, ``WORLD_SIZE``,
``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``. Unlike under torchrun, a signal leaves them as much time
as they need to save (torchrun kills after 30 s), and a rank that fails ends the others within seconds.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from trainfit.measurement.process import FROM_OUTSIDE, POLL_S, StoppedProcesses, die_with_parent
from trainfit.spec.errors import EXIT_BAD_INPUT, EXIT_STOPPED, InputError
from trainfit.spec.stop import StopSignal

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
LAUNCHER = "TRAINFIT_LAUNCHER"
"""Environment variable of a rank: the process id of the launcher, which reports a killed rank."""
STOPPED_S = 20.0
"""A rank that is stopped (SIGSTOP) for this long ends the run. While all train, the ranks detect it first."""
GRACE_S = 8.0  # Time in which ranks end after one has failed; they notice it within about a second (watch.py)


class RankKilledError(Exception):
    """A signal ended a rank, or stopped it for long, and the others were ended too."""

    def __init__(self, rank: int, pid: int, number: int):
        self.from_outside = number in (*FROM_OUTSIDE, signal.SIGSTOP)
        """Another process sent the signal; otherwise the rank crashed."""
        what = f"was ended by {signal.Signals(number).name}"
        if number == signal.SIGSTOP:
            what = f"has been stopped for {STOPPED_S:.0f} s"
        super().__init__(f"rank {rank} (process {pid}) {what}")


def is_launched() -> bool:
    """Return whether the environment makes this process a rank."""
    return set(RANK_VARIABLES) <= set(os.environ)


def started_by_us() -> bool:
    """Return whether ``launch`` started this process as a rank, after its own checks."""
    return is_launched() and LAUNCHER in os.environ


def launched_rank() -> int:
    """Return this process's rank by its environment; 0 for a process that is no rank."""
    return int(os.environ["RANK"]) if is_launched() else 0


def launched_world_size() -> int:
    """Return the number of ranks by the environment; 1 for a process that is no rank."""
    return int(os.environ["WORLD_SIZE"]) if is_launched() else 1


def end_with_launcher() -> None:
    """End this rank when the process that started it dies."""
    if is_launched():
        die_with_parent(int(os.environ.get(LAUNCHER, os.getppid())))


@contextmanager
def one_report() -> Iterator[None]:
    """Let rank 0 alone report bad input that every rank finds: another rank ends without a line."""
    try:
        yield
    except InputError:
        if launched_rank() == 0:
            raise
        raise SystemExit(EXIT_BAD_INPUT) from None


def launch(arguments: Sequence[str], count: int) -> int:
    """Run ``trainfit ARGUMENTS`` as ``count`` ranks and return their exit code.

    Standard output is rank 0's. A first SIGTERM or SIGINT is sent to every rank; a second one ends them.

    Raises:
        RankKilledError: a signal ended a rank, or stopped it for ``STOPPED_S``.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    environment = os.environ | {
        "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()), LAUNCHER: str(os.getpid()),
    }  # fmt: skip
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    # A rank whose peer was killed would print a stack of C++ frames as a warning.
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // count)))
    with StopSignal() as stop:
        try:
            for rank in range(count):
                process = subprocess.Popen(
                    [sys.executable, "-m", "trainfit", *arguments],
                    env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.DEVNULL, stdout=None if rank == 0 else subprocess.DEVNULL,
                    start_new_session=True,
                )  # fmt: skip
                ranks.append(process)
            return _wait(ranks, stop)
        finally:
            for process in ranks:
                with suppress(ProcessLookupError):  # The rank's workers are in its process group.
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait(ranks: Sequence["subprocess.Popen[bytes]"], stop: StopSignal) -> int:
    """Wait for every rank, after a failure for a short time; return the first failure's exit code."""
    failed: int | None = None
    deadline_s, forwarded = float("inf"), False
    stopped = StoppedProcesses(STOPPED_S)
    while None in [process.poll() for process in ranks] and time.monotonic() < deadline_s:
        if failed is None:
            failed = _failed(ranks)
            pid = stopped.first(process.pid for process in ranks)
            if failed is None and pid is not None:  # Ranks do not watch each other while they start or leave.
                rank = next(number for number, process in enumerate(ranks) if process.pid == pid)
                raise RankKilledError(rank, pid, signal.SIGSTOP)
            if failed is not None:
                deadline_s = time.monotonic() + GRACE_S
                for process in ranks:  # A stopped process could not end.
                    process.send_signal(signal.SIGCONT)
        if stop.name is not None and not forwarded:
            forwarded = True
            for process in ranks:
                process.send_signal(signal.Signals[stop.name])
        time.sleep(POLL_S)
    failed = _failed(ranks) if failed is None else failed
    if failed is None:
        return 0
    code = ranks[failed].returncode
    if code < 0:
        raise RankKilledError(failed, ranks[failed].pid, -code)
    return code


def _failed(ranks: Sequence["subprocess.Popen[bytes]"]) -> int | None:
    """Return a rank that has failed; one that a signal ended comes first, as the others end because of it."""
    codes = {rank: process.returncode for rank, process in enumerate(ranks) if process.returncode}
    return min(codes, key=codes.__getitem__, default=None)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def exit_code_of(error: RankKilledError) -> int:
    """Return 75, resumable, for a rank that another process ended; 70 for a crash."""
    return EXIT_STOPPED if error.from_outside else 70
