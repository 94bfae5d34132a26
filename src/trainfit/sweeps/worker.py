"""A worker process that runs one trial after another, each in a fork, and the parent's end of it.

The process imports torch, transformers and peft once and does not touch CUDA, so a trial starts in
milliseconds instead of seconds. Where CUDA does not work in a fork, each trial is a new interpreter. The
process reads a PartRequest a line on standard input. It writes ``ready``, then a PartResult a line on
standard output. Its end, by SIGTERM too, ends its trial.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import wait
from typing import IO

from trainfit.measurement.fork_server import ready_to_fork
from trainfit.measurement.process import die_with_parent, forked
from trainfit.spec.parsing.parse import parse
from trainfit.spec.printable import say
from trainfit.sweeps.parts import OnStart, PartRequest, PartResult, ended, run_part

READY = b"ready\n"
PROGRAM = "import sys; from trainfit.sweeps.worker import main; sys.exit(main(*sys.argv[1:]))"
IMPORTS = {
    "predict": ("trainfit.prediction.estimate", "trainfit.prediction.trace"),
    "device": ("trainfit.measurement.meter", "trainfit.training.loop"),
}
"""Modules that the trials of each role would otherwise import one by one."""
LEAVE_S = 5.0
GRACE_S = 120.0  # A worker that has not answered this long after its trial's time limit is ended


def start(role: str, device: str, environment: dict[str, str], log: IO[bytes]) -> "subprocess.Popen[bytes]":
    """Start a worker's process, a new interpreter."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, role, device], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=log, env={**os.environ, **environment}, start_new_session=True,
    )  # fmt: skip


class Worker:
    """A worker process, as its parent sees it: idle, or busy with ``request``."""

    def __init__(self, role: str, device: str, environment: dict[str, str]):
        self.environment = environment
        self.request: PartRequest | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker
        self._process = start(role, device, environment, self._log)
        assert self._process.stdin is not None, "opened as a pipe"
        assert self._process.stdout is not None, "opened as a pipe"
        self._requests, self._answers = self._process.stdin, self._process.stdout
        self._is_ready = False
        self._began_s = 0.0

    def fileno(self) -> int:
        """Return the descriptor that answers are read from."""
        return self._answers.fileno()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def take(self, request: PartRequest, on_start: OnStart) -> None:
        """Begin with a request, as soon as the imports are done."""
        self.request = request
        if self._is_ready:
            self._begin(request, on_start)

    def _begin(self, request: PartRequest, on_start: OnStart) -> None:
        self._began_s = time.monotonic()
        on_start(request)
        with suppress(BrokenPipeError):  # Its end is noticed when the answer is read.
            self._requests.write(request.model_dump_json().encode() + b"\n")
            self._requests.flush()

    def result(self, on_start: OnStart) -> PartResult | None:
        """Return the result of the request; None while there is none.

        Raises:
            RuntimeError: the process ended before it was ready.
        """
        request, seconds = self.request, time.monotonic() - self._began_s
        assert request is not None, "the worker is busy"
        is_overdue = self._is_ready and seconds > request.timeout_s + GRACE_S
        if wait([self.fileno()], 0):
            line = self._answers.readline()
        elif self.is_alive and not is_overdue:
            return None
        else:  # A trial of a worker that has died may still hold the other end of the pipe.
            line = b""
        if line == READY:
            self._is_ready = True
            self._begin(request, on_start)
            return None
        self.request = None
        if line.endswith(b"\n"):
            return parse(PartResult, json.loads(line))
        if is_overdue:
            self.close()
            return ended(request, "timeout", "neither the trial nor its worker came to an end", seconds)
        if not self._is_ready:
            raise RuntimeError(f"no trial can be started here: {self._last_words()}")
        return ended(request, "lost", f"its worker ended: {self._last_words()}", seconds)

    def _last_words(self) -> str:
        code = self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()[-4:]
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        return f"{how}: {' / '.join(lines)}".rstrip(": ")

    def leave(self) -> None:
        """Ask the process to end its trial and itself."""
        if self.is_alive:
            self._process.terminate()

    def close(self) -> None:
        """End the process and its trial, by force where that takes too long."""
        self.leave()
        try:
            self._process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        with suppress(BrokenPipeError):  # Of a request that it did not read.
            self._requests.close()
        self._answers.close()
        self._log.close()


def main(role: str, device: str) -> int:
    """Serve requests until standard input ends."""
    die_with_parent(os.getppid())
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The sweep handles it and ends this process.
    # What libraries print must not stand among the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # so that importing leaves CUDA untouched
    start_s = time.monotonic()
    for module in IMPORTS[role]:
        importlib.import_module(module)
    start_trial = ready_to_fork("cpu" if role == "predict" else device)
    if "peft" not in sys.modules:
        say("peft cannot be imported: recipes with an adapter will be refused")
    how = "fork" if start_trial is forked else "spawn"
    say(f"imports took {time.monotonic() - start_s:.1f} s; trials start by {how}")
    answers.write(READY.decode())
    for line in iter(sys.stdin.readline, ""):
        request = parse(PartRequest, json.loads(line))
        answers.write(run_part(request, start_trial).model_dump_json() + "\n")
    return 0


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)  # run_to_end ends its trial's group on the way out
