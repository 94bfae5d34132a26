"""Processes that answer requests, a JSON line each way. On Linux torch is imported once, then forked.

A server imports and forks; each fork answers from one pair of pipes. Where a fork has kept too much memory,
or was killed, the server makes another one for its pipes.

The first line to each process holds what is the same for all its requests. A process that has not got it, as
the one before was killed between two requests, says so and gets it. Answers have the number of their request,
so that one of a request that was given up is not taken for another's. Processes end when their requests' pipe
closes, as it does when the parent ends in any way.
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
from pathlib import Path
from typing import IO, Any

from trainfit.planning.room import Room
from trainfit.virtual import forked

if sys.platform != "win32":
    import resource

CAN_FORK = sys.platform == "linux"
"""Elsewhere a process that has loaded the system's mathematics libraries cannot be forked safely."""
PROGRAM = "import sys; from trainfit.planning.workers import serve; serve(*sys.argv[1:])"
NICENESS = 5
"""Priority (nice) of processes that answer requests ahead, so that they only use idle cores."""
RENEWED = 3
"""Exit code of a process that is to be replaced."""
RENEW = {"renew": True}
"""The request to end, and to be replaced by a process that holds nothing yet."""

Answer = Callable[[dict[str, Any]], dict[str, Any]]


class KilledError(RuntimeError):
    """A process was killed while it answered; another one has taken its place."""


class Worker:
    """The parent's end of one process."""

    def __init__(self, requests: int, answers: int, shared: dict[str, Any]):
        self._requests: IO[str] = os.fdopen(requests, "w")
        self._answers: IO[str] = os.fdopen(answers)
        self._shared, self._is_new, self._number = shared, True, 0
        self.peak_bytes = self.held_bytes = 0
        """What the last answer took at most, and what the process has kept of it."""

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request.

        Raises:
            KilledError: the process was killed.
            RuntimeError: the process ended, and there is no other one.
        """
        self._number += 1
        if self._is_new:
            self._write({"shared": self._shared})
        self._is_new = False
        self._write({"number": self._number, "ask": request})
        while True:
            line = self._answers.readline()
            if not line:
                raise RuntimeError("a process that traces recipes ended unexpectedly")
            given = json.loads(line)
            if "killed" in given:
                self._is_new = True
                raise KilledError(f"a process that traces recipes was killed by signal {given['killed']}")
            if given.get("number") != self._number:
                continue  # Of a request before, whose process was killed.
            if "answer" in given:
                break
            self._write({"shared": self._shared})
            self._write({"number": self._number, "ask": request})
        self.peak_bytes, self.held_bytes = given["peak_bytes"], given["held_bytes"]
        return given["answer"]

    def _write(self, line: dict[str, Any]) -> None:
        with suppress(BrokenPipeError):
            self._requests.write(json.dumps(line) + "\n")
            self._requests.flush()

    def renew(self) -> None:
        """Have the process replaced before the next request."""
        self._write(RENEW)
        self._answers.readline()
        self._is_new = True

    def close(self) -> None:
        """Close the pipes."""
        for pipe in (self._requests, self._answers):
            with suppress(OSError):
                pipe.close()


class _Pool:
    """Processes of one priority, each with a thread that waits for its answer."""

    def __init__(self, idle: list[Worker], room: Room):
        self._idle, self.count, self._room = idle, len(idle), room
        self.threads = ThreadPoolExecutor(max(1, len(idle)))

    def ask(self, request: dict[str, Any]) -> Future[dict[str, Any]]:
        return self.threads.submit(self._answered, request)

    def _answered(self, request: dict[str, Any]) -> dict[str, Any]:
        worker = self._idle.pop()
        try:
            with self._room.one():
                try:
                    return self._asked(worker, request)
                except KilledError:
                    pass  # Most likely for want of memory: once more, without others.
            with self._room.one(alone=True):
                return self._asked(worker, request)
        finally:
            self._idle.append(worker)

    def _asked(self, worker: Worker, request: dict[str, Any]) -> dict[str, Any]:
        answer = worker.ask(request)
        self._room.took(worker.peak_bytes)
        if CAN_FORK and self._room.is_too_large(worker.held_bytes):
            worker.renew()
        return answer


class Workers:
    """Several processes.

    Args:
        count: of processes.
        answers: importable function that takes ``shared`` and returns an ``Answer``, as ``module:name``.
        imports: modules that are imported before the first request.
        num_ahead: further processes, of lower priority, for requests ahead; only where processes can fork.
        shared: what is the same for every request, sent to each process once.
        room: for traces at once; None: of these processes alone.
    """

    def __init__(
        self,
        count: int,
        answers: str,
        imports: Sequence[str],
        num_ahead: int = 0,
        *,
        shared: dict[str, Any],
        room: Room | None = None,
    ):
        room = room or Room()
        self._each: list[Worker] = []
        self._servers: list[subprocess.Popen[bytes]] = []
        num_ahead = num_ahead if CAN_FORK else 0
        for number in [count + num_ahead] if CAN_FORK else [1] * count:
            self._start(number, answers, imports, num_ahead, shared)
        self._pool, self._ahead = _Pool(self._each[:count], room), _Pool(self._each[count:], room)
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
    every = json.loads(pipes)
    if not CAN_FORK:
        (only,) = every
        _serve(only, make)
        return
    running: dict[int, int] = {}
    for number in range(len(every)):
        _fork(number, every, int(num_ahead), make, running)
    while running:
        pid, status = os.wait()
        number = running.pop(pid)
        if os.WIFSIGNALED(status):
            with suppress(BrokenPipeError):
                os.write(every[number][1], (json.dumps({"killed": os.WTERMSIG(status)}) + "\n").encode())
        elif os.WEXITSTATUS(status) != RENEWED:
            _close([every[number]])  # The parent has closed its end too; or it learns that there is no more.
            continue
        _fork(number, every, int(num_ahead), make, running)


def _fork(
    number: int,
    every: Sequence[tuple[int, int]],
    num_ahead: int,
    make: Callable[[dict[str, Any]], Answer],
    running: dict[int, int],
) -> None:
    """Start a process for a pair of pipes."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            for other in set(range(len(every))) - {number}:
                with suppress(OSError):  # Its process has ended.
                    _close([every[other]])
            if number >= len(every) - num_ahead:
                os.nice(NICENESS)
            code = RENEWED if _serve(every[number], make) else 0
        finally:
            os._exit(code)
    running[pid] = number


def _close(pairs: Sequence[tuple[int, int]]) -> None:
    for pair in pairs:
        for pipe in pair:
            os.close(pipe)


def _serve(pair: tuple[int, int], make: Callable[[dict[str, Any]], Answer]) -> bool:
    """Answer requests; return whether the process is to be replaced, rather than the pipe closed."""
    requests, answers = pair
    before = _resident_bytes()
    with os.fdopen(requests) as lines, os.fdopen(answers, "w") as out:
        answer: Answer | None = None
        for line in lines:
            request = json.loads(line)
            if request == RENEW:
                out.write("{}\n")  # Only now the next request may be sent: this process must not read it.
                return True
            if "shared" in request:
                answer = make(request["shared"])
                continue
            found: dict[str, Any] = {"number": request["number"]}
            if answer is not None:
                found |= {"answer": answer(request["ask"]), **_grown(before)}
            out.write(json.dumps(found) + "\n")
            out.flush()
    return False


def _grown(before: int) -> dict[str, int]:
    """Return the bytes by which this process, with those that it forked, has grown: now, and at most."""
    if sys.platform == "win32":
        return {"peak_bytes": 0, "held_bytes": 0}
    unit = 1 if sys.platform == "darwin" else 1024
    own, forks = (
        resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    peak = unit * max(own, forks)
    return {"peak_bytes": max(0, peak - before), "held_bytes": max(0, _resident_bytes() - before)}


def _resident_bytes() -> int:
    """Return the memory of this process now; where that is not known, 0."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
