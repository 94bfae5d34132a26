"""Processes that answer requests, a JSON line each way. On Linux torch is imported once, then forked.

The first line to each holds what is the same for all its requests.

They end when their requests' pipe closes, as it does when the parent ends in any way.
"""

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import IO, Any

from trainfit.virtual import forked

CAN_FORK = sys.platform == "linux"
"""Elsewhere a process that has loaded the system's mathematics libraries cannot be forked safely."""
PROGRAM = "import sys; from trainfit.planning.workers import serve; serve(*sys.argv[1:])"
NICENESS = 5
"""Priority (nice) of processes that answer requests ahead, so that they only use idle cores."""

Answer = Callable[[dict[str, Any]], dict[str, Any]]


class Worker:
    """The parent's end of one process."""

    def __init__(self, requests: int, answers: int, shared: dict[str, Any]):
        self._requests: IO[str] = os.fdopen(requests, "w")
        self._answers: IO[str] = os.fdopen(answers)
        self._first: dict[str, Any] | None = shared

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request.

        Raises:
            RuntimeError: the process ended.
        """
        with suppress(BrokenPipeError):
            if self._first is not None:
                self._requests.write(json.dumps(self._first) + "\n")
                self._first = None
            self._requests.write(json.dumps(request) + "\n")
            self._requests.flush()
        line = self._answers.readline()
        if not line:
            raise RuntimeError("a process that traces recipes ended unexpectedly")
        return json.loads(line)

    def close(self) -> None:
        """Close the pipes."""
        for pipe in (self._requests, self._answers):
            with suppress(OSError):
                pipe.close()


class _Pool:
    """Processes of one priority, each with a thread that waits for its answer."""

    def __init__(self, idle: list[Worker]):
        self._idle, self.count = idle, len(idle)
        self.threads = ThreadPoolExecutor(max(1, len(idle)))

    def ask(self, request: dict[str, Any]) -> Future[dict[str, Any]]:
        return self.threads.submit(self._answered, request)

    def _answered(self, request: dict[str, Any]) -> dict[str, Any]:
        worker = self._idle.pop()
        try:
            return worker.ask(request)
        finally:
            self._idle.append(worker)


class Workers:
    """Several processes.

    Args:
        count: of processes.
        answers: importable function that takes ``shared`` and returns an ``Answer``, as ``module:name``.
        imports: modules that are imported before the first request.
        num_ahead: further processes, of lower priority, for requests ahead; only where processes can fork.
        shared: what is the same for every request, sent to each process once.
    """

    def __init__(
        self,
        count: int,
        answers: str,
        imports: Sequence[str],
        num_ahead: int = 0,
        *,
        shared: dict[str, Any],
    ):
        self._each: list[Worker] = []
        self._servers: list[subprocess.Popen[bytes]] = []
        num_ahead = num_ahead if CAN_FORK else 0
        for number in [count + num_ahead] if CAN_FORK else [1] * count:
            self._start(number, answers, imports, num_ahead, shared)
        self._pool, self._ahead = _Pool(self._each[:count]), _Pool(self._each[count:])
        self.num_ahead = self._ahead.count

    def ask(self, request: dict[str, Any], *, ahead: bool = False) -> Future[dict[str, Any]]:
        """Give a request to the first idle process; a request ahead to the processes of lower priority."""
        return (self._ahead if ahead and self.num_ahead else self._pool).ask(request)

    def _start(
        self, count: int, answers: str, imports: Sequence[str], num_ahead: int, shared: dict[str, Any]
    ) -> None:
        paths = os.pathsep.join(path for path in sys.path if path)
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        environment["CUDA_VISIBLE_DEVICES"] = (
            ""  # Imports (torchao) must not initialise CUDA before the forks.
        )
        theirs: list[tuple[int, int]] = []
        for _ in range(count):
            requests, requests_in = os.pipe()
            answered, answered_in = os.pipe()
            theirs.append((requests, answered_in))
            self._each.append(Worker(requests_in, answered, shared))
        pipes = [each for pair in theirs for each in pair]
        given = [json.dumps(theirs), str(num_ahead), answers, ",".join(imports)]
        command = [sys.executable, "-c", PROGRAM, *given]
        self._servers.append(
            subprocess.Popen(
                command, env=environment, pass_fds=pipes, start_new_session=True, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )
        )  # fmt: skip
        for pipe in pipes:
            os.close(pipe)

    def close(self) -> None:
        """End all processes, also those that are tracing."""
        for server in self._servers:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()
        for pool in (self._pool, self._ahead):
            pool.threads.shutdown(cancel_futures=True)
        for worker in self._each:
            worker.close()


def serve(pipes: str, num_ahead: str, answers: str, imports: str) -> None:
    """Import modules, then answer requests in one process for each pair of pipes, until these close.

    The last ``num_ahead`` processes have a lower priority.
    """
    forked.allow()
    gc.disable()  # Imports leave no garbage, and each trace collects its own.
    from trainfit.virtual.trace.process_state import freeze_for_good  # Imports torch.

    for name in imports.split(","):
        with suppress(Exception):  # The trace that needs it says what is missing.
            importlib.import_module(name)
    module, _, name = answers.partition(":")
    make: Callable[[dict[str, Any]], Answer] = getattr(importlib.import_module(module), name)
    freeze_for_good()  # What is imported stays, so no collection needs to visit it, nor copy its pages.
    first, *others = json.loads(pipes)
    for number, own in enumerate(others):
        if os.fork() == 0:
            _close([first, *others[number + 1 :]])
            if number >= len(others) - int(num_ahead):
                os.nice(NICENESS)
            _serve(own, make)
            os._exit(0)
        _close([own])
    _serve(first, make)


def _close(pairs: Sequence[tuple[int, int]]) -> None:
    for pair in pairs:
        for pipe in pair:
            os.close(pipe)


def _serve(pair: tuple[int, int], make: Callable[[dict[str, Any]], Answer]) -> None:
    requests, answers = pair
    with os.fdopen(requests) as lines, os.fdopen(answers, "w") as out:
        answer: Answer | None = None
        for line in lines:
            if answer is None:
                answer = make(json.loads(line))
                continue
            out.write(json.dumps(answer(json.loads(line))) + "\n")
            out.flush()
