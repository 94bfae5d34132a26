"""A trial in a process and process group of its own, with a time limit that ends the whole group.

The result goes through a file and the output through another, so a grandchild that keeps a pipe open delays
nothing. A trial starts as a new interpreter (``spawned``) or as a fork of this process (``forked``: no
import to wait for).
"""

import ctypes
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainfit.measurement.trial_files import ERROR, REQUEST, RESULT, TrialRequest
from trainfit.spec.errors import EXIT_IO, InputError
from trainfit.spec.files import write_text
from trainfit.spec.parsing.parse import parse
from trainfit.spec.result import Measurement

LOG = "output.txt"
TRIAL = "trainfit.measurement.run"  # The module whose main(folder) runs a measurement's trial
PROGRAM = """import importlib, pathlib, sys
from trainfit.measurement.process import die_with_parent
die_with_parent(int(sys.argv[3]))  # Before the slow imports.
sys.exit(importlib.import_module(sys.argv[1]).main(pathlib.Path(sys.argv[2])))"""
"""A new interpreter's program: the module whose ``main`` it runs, the trial's folder, and the parent."""
PF_EXITING = 0x4
"""Flag of a process that is exiting (include/linux/sched.h)."""
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals sent by another process; the others follow from an error of the process itself."""
PR_SET_PDEATHSIG = 1  # linux/prctl.h
POLL_S = 0.05
NUM_LAST_LINES = 8

Start = Callable[[Path], int]
"""Starts the trial of a folder in a process group of its own; its process id (also the group's)."""


class TrialStorageError(OSError):
    """A file of a trial could not be written, which says nothing about its recipe."""


@dataclass(frozen=True)
class Ending:
    """End of a trial's process: exit code, or signal; ``timed_out``: by the time limit."""

    exit_code: int | None
    signal: int | None
    timed_out: bool
    system_out_of_memory: bool

    @property
    def killed(self) -> bool:
        """True if another process ended it, other than by its time limit or the system's lack of memory."""
        return self.signal in FROM_OUTSIDE and not self.timed_out and not self.system_out_of_memory

    @property
    def words(self) -> str:
        return f"exit code {self.exit_code}" if self.signal is None else f"signal {self.signal}"


def process_state(pid: int) -> tuple[str, int]:
    """Return a process's state (proc(5): R, S, D, T, Z) and start time; ("X", 0) if there is none."""
    fields = _stat(pid)
    return (fields[0], int(fields[19])) if fields else ("X", 0)


def is_exiting(pid: int) -> bool:
    """Return whether the kernel is tearing a process down: its connections may close before it has ended."""
    fields = _stat(pid)
    return bool(fields) and bool(int(fields[6]) & PF_EXITING)


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; [] without such a process, or without /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return text[text.rindex(")") + 2 :].split()


class StoppedProcesses:
    """Finds, among processes that are polled, one that has been stopped (SIGSTOP) for ``limit_s``."""

    def __init__(self, limit_s: float):
        self.limit_s = limit_s
        self._since_s: dict[int, float] = {}

    def first(self, pids: Iterable[int]) -> int | None:
        """Return the one stopped longest, once that is too long; None: there is none."""
        now_s = time.monotonic()
        stopped = {pid: self._since_s.get(pid, now_s) for pid in pids if process_state(pid)[0] == "T"}
        self._since_s = stopped
        longest = min(stopped, key=stopped.__getitem__, default=None)
        return longest if longest is not None and now_s - stopped[longest] > self.limit_s else None


def die_with_parent(parent: int) -> None:
    """End this process when its parent (a process id) dies, so that no trial keeps the GPU. Linux only.

    The parent is the thread that started this process: it must live as long as its trials.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # It died before the call above.
            os._exit(1)


def spawned(folder: Path, module: str = TRIAL, *, own_group: bool = True) -> int:
    """Start the trial of ``folder``, which ``module`` runs, as a new interpreter.

    Args:
        own_group: in a process group of its own; else in this process's.
    """
    with open(folder / LOG, "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, module, str(folder), str(os.getpid())],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=own_group,
        )  # fmt: skip
    process.returncode = 0  # run_to_end reaps it by its id; Popen need not warn that it did not.
    return process.pid


def forked(folder: Path, module: str = TRIAL, *, own_group: bool = True) -> int:
    """Start the trial of ``folder``, which ``module`` runs, as a fork of this process.

    This process must not have used CUDA, nor started autograd's threads (``virtual.forked``).

    Args:
        own_group: in a process group of its own; else in this process's.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    parent, pid = os.getpid(), os.fork()
    if pid:
        return pid
    code = 1
    gc.freeze()  # A collection that visited the parent's objects would copy all of its memory.
    try:
        if own_group:
            os.setsid()
        log = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        die_with_parent(parent)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Not the parent's handler.
        code = importlib.import_module(module).main(folder)
    except BaseException:  # A fork must never return into its parent's code.
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_in(
    folder: Path, request: TrialRequest, start: Start, timeout_s: float | None
) -> tuple[Measurement, Ending]:
    """Run one trial; return its Measurement, however the process ended, and its Ending.

    Raises:
        InputError: the trial refused its recipe or device.
        TrialStorageError: a file of the trial could not be written.
    """
    nothing = Measurement(
        recipe_id=request.recipe.id, status="crashed", message="ended before it began",
        environment=request.environment,
    )  # fmt: skip
    write_text(folder / RESULT, nothing.model_dump_json())
    write_text(folder / REQUEST, request.model_dump_json())
    ending = run_to_end(folder, start, timeout_s)
    if (folder / ERROR).is_file():
        raise InputError(**json.loads((folder / ERROR).read_text()))
    noted = parse(Measurement, json.loads((folder / RESULT).read_text()))
    if noted.status != "crashed":  # The trial finished, or reported that it ran out of memory.
        return noted, ending
    status, message = noted.status, f"{noted.message} ({ending.words}): {last_lines(folder)}".rstrip(": ")
    if ending.timed_out:
        status, message = "timeout", f"{noted.message} after {timeout_s:g} s"
    elif ending.signal is not None and ending.system_out_of_memory:
        reason = f"killed by signal {ending.signal} as the system ran out of memory"
        status, message = "out-of-memory", f"{noted.message}: {reason}"
    return noted.model_copy(update={"status": status, "message": message}), ending


def run_to_end(folder: Path, start: Start, timeout_s: float | None) -> Ending:
    """Start the trial of ``folder``, and wait until it and its whole group have ended."""
    kills_before = _num_system_kills()
    code, timed_out = _wait(start(folder), timeout_s)
    if code == EXIT_IO:
        printed = last_lines(folder) or f"{tempfile.gettempdir()}: a trial's files could not be written"
        raise TrialStorageError(printed.splitlines()[-1])
    exit_code, by_signal = (code, None) if code >= 0 else (None, -code)
    return Ending(exit_code, by_signal, timed_out, _num_system_kills() > kills_before)


def _wait(pid: int, timeout_s: float | None) -> tuple[int, bool]:
    """Wait for ``pid``, then end the rest of its group; return the exit code, and whether time ran out."""
    deadline = time.monotonic() + (float("inf") if timeout_s is None else timeout_s)
    ended, status, timed_out = 0, 0, False
    try:
        while not ended and not timed_out:
            ended, status = os.waitpid(pid, os.WNOHANG)
            timed_out = not ended and time.monotonic() > deadline
            if not ended and not timed_out:
                time.sleep(POLL_S)
    finally:
        _end_group(pid)
        if not ended:
            _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), timed_out


def _end_group(pid: int) -> None:
    for end in (os.killpg, os.kill):  # os.kill: a fork has no group of its own before its setsid.
        with suppress(ProcessLookupError):
            end(pid, signal.SIGKILL)


def last_lines(folder: Path) -> str:
    """Return the last lines that the trial of ``folder`` printed."""
    log = folder / LOG
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    return "\n".join(lines[-NUM_LAST_LINES:]).strip()


def _num_system_kills() -> int:
    """Return how often Linux's out-of-memory killer acted, on this machine or in this control group."""
    count = 0
    for path in (Path("/proc/vmstat"), Path("/sys/fs/cgroup/memory.events")):
        if path.is_file():
            fields = dict(line.split() for line in path.read_text().splitlines())
            count += int(fields.get("oom_kill", 0))
    return count
