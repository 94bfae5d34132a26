"""A trial in a process and process group of its own, with a time limit that ends the whole group.

The result goes through a file and the output through another, so a grandchild that keeps a pipe open holds
nobody up. A trial starts as a new interpreter (``spawned``) or as a copy of this process (``forked``: no
import to wait for).
"""

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainfit.measurement.lifeline import die_with_parent
from trainfit.measurement.trial import ERROR, REQUEST, RESULT, TrialRequest
from trainfit.spec.errors import EXIT_IO, InputError
from trainfit.spec.files import write_text
from trainfit.spec.result import Measurement
from trainfit.spec.value import parse

LOG = "output.txt"
TRIAL = "trainfit.measurement.trial"
"""The module whose ``main(folder)`` runs a measurement's trial."""
PROGRAM = """import importlib, pathlib, sys
from trainfit.measurement.lifeline import die_with_parent
die_with_parent()  # Before the slow imports.
sys.exit(importlib.import_module(sys.argv[1]).main(pathlib.Path(sys.argv[2])))"""
"""A new interpreter's program: the module whose ``main`` it runs, and the trial's folder."""
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that somebody sends; the others are what a process's own mistake brings on it."""
POLL_S = 0.05
NUM_LAST_LINES = 8

Start = Callable[[Path], int]
"""Starts the trial of a folder in a process group of its own; its process id (also the group's)."""


class TrialStorageError(OSError):
    """A trial ended because the disk did not take a file, which says nothing about its recipe.

    Args:
        lines: the last lines that the trial printed; none where the disk did not take those either.
    """

    def __init__(self, lines: Sequence[str]):
        super().__init__(
            lines[-1] if lines else f"{tempfile.gettempdir()}: a trial's files could not be written"
        )


@dataclass(frozen=True)
class Ending:
    """End of a trial's process: exit code, or signal; ``timed_out``: by the time limit."""

    exit_code: int | None
    signal: int | None
    timed_out: bool
    system_out_of_memory: bool

    @property
    def killed(self) -> bool:
        """Somebody else ended it, not its time limit and not the system for want of memory."""
        return self.signal in FROM_OUTSIDE and not self.timed_out and not self.system_out_of_memory

    @property
    def words(self) -> str:
        return f"exit code {self.exit_code}" if self.signal is None else f"signal {self.signal}"


def spawned(folder: Path, module: str = TRIAL) -> int:
    """Start the trial of ``folder``, which ``module`` runs, as a new interpreter."""
    with open(folder / LOG, "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, module, str(folder)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    process.returncode = 0  # run_in reaps it by its id; Popen need not warn that it did not
    return process.pid


def forked(folder: Path, module: str = TRIAL) -> int:
    """Start the trial of ``folder``, which ``module`` runs, as a fork of this process, which must not have
    used CUDA.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    gc.freeze()  # A collection passes over what the maker made: to look at it would copy all of its memory.
    try:
        os.setsid()
        log = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        die_with_parent()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # What the maker does at a signal is not the trial's.
        code = importlib.import_module(module).main(folder)
    except (
        BaseException
    ):  # The copy must never return into its maker's code; the reason goes into its output.
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_in(folder: Path, request: TrialRequest, start: Start, timeout_s: float | None) -> Measurement:
    """Run one trial; its Measurement, whatever became of the process.

    Raises:
        InputError: what the trial refused.
    """
    return run_and_tell(folder, request, start, timeout_s)[0]


def run_and_tell(
    folder: Path, request: TrialRequest, start: Start, timeout_s: float | None
) -> tuple[Measurement, Ending]:
    """``run_in``, and how the process ended."""
    write_text(folder / REQUEST, request.model_dump_json())
    ending = run_to_end(folder, start, timeout_s)
    if (folder / ERROR).is_file():
        raise InputError(**json.loads((folder / ERROR).read_text()))
    return _read(folder, request, ending, timeout_s), ending


def run_to_end(folder: Path, start: Start, timeout_s: float | None) -> Ending:
    """Start the trial of ``folder`` and wait until it and its whole group are gone.

    Raises:
        TrialStorageError: the disk did not take a file of the trial's.
    """
    kills_before = _num_system_kills()
    exit_code, by_signal, timed_out = _wait(start(folder), timeout_s)
    if exit_code == EXIT_IO:
        raise TrialStorageError(last_lines(folder).splitlines())
    return Ending(exit_code, by_signal, timed_out, _num_system_kills() > kills_before)


def _wait(pid: int, timeout_s: float | None) -> tuple[int | None, int | None, bool]:
    """Wait for ``pid``, then end what is left of its group. Exit code, signal, whether its time was over."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    timed_out = False
    try:
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                break
            if deadline is not None and time.monotonic() > deadline:
                timed_out = True
                _end_group(pid)
                _, status = os.waitpid(pid, 0)
                break
            time.sleep(POLL_S)
    except BaseException:
        _end_group(pid)
        os.waitpid(pid, 0)
        raise
    _end_group(pid)
    code = os.waitstatus_to_exitcode(status)
    return (code, None, timed_out) if code >= 0 else (None, -code, timed_out)


def _end_group(pid: int) -> None:
    for end in (
        os.killpg,
        os.kill,
    ):  # os.kill: a copy that has not come to setsid yet has no group of its own
        try:
            end(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _read(folder: Path, request: TrialRequest, ending: Ending, timeout_s: float | None) -> Measurement:
    printed = last_lines(folder)
    if not (folder / RESULT).is_file():
        assert request.environment is not None, "the asker gives the host's environment"
        nothing = Measurement(
            recipe_id=request.recipe.id,
            status="crashed",
            message="ended before it began",
            environment=request.environment,
        )
        write_text(folder / RESULT, nothing.model_dump_json())
    noted = parse(Measurement, json.loads((folder / RESULT).read_text()))
    if noted.status != "crashed":  # The trial came to its end, or met its own end of memory.
        return noted
    if ending.timed_out:
        return noted.model_copy(
            update={"status": "timeout", "message": f"{noted.message} after {timeout_s:g} s"}
        )
    if ending.signal is not None and ending.system_out_of_memory:
        message = f"{noted.message}: killed by signal {ending.signal} as the system ran out of memory"
        return noted.model_copy(update={"status": "out-of-memory", "message": message})
    return noted.model_copy(update={"message": f"{noted.message} ({ending.words}): {printed}".rstrip(": ")})


def last_lines(folder: Path) -> str:
    """The last lines that the trial of ``folder`` printed."""
    log = folder / LOG
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    return "\n".join(lines[-NUM_LAST_LINES:]).strip()


def _num_system_kills() -> int:
    """Return the kills by Linux's out-of-memory killer, on this machine or in this control group."""
    count = 0
    for path, name in (("/proc/vmstat", "oom_kill"), ("/sys/fs/cgroup/memory.events", "oom_kill")):
        if Path(path).is_file():
            fields = dict(line.split() for line in Path(path).read_text().splitlines())
            count += int(fields.get(name, 0))
    return count
