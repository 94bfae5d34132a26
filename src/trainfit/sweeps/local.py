"""Run trials on this machine: predictions in parallel on the CPU, measurements one to a GPU (or CPU).

A thread owns each worker process; one that dies costs its
trial a row ("lost") and is replaced.
"""

import json
import math
import os
import queue
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO

from trainfit.measurement.nvml import visible_gpus
from trainfit.spec.errors import InputError
from trainfit.spec.value import parse
from trainfit.sweeps.parts import PartRequest, PartResult, ended
from trainfit.sweeps.slot import READY

MAX_PREDICTIONS = 8
"""Side by side; each takes a core and half a GiB."""
POLL_S = 0.1
LEAVE_S = 5.0
GRACE_S = 120.0
"""A slot that has not answered this long after its trial's time limit is itself ended."""

PROGRAM = "import sys; from trainfit.sweeps.slot import main; sys.exit(main(*sys.argv[1:]))"

Stop = Callable[[], bool]
OnStart = Callable[[PartRequest], None]
Events = queue.SimpleQueue[tuple[PartRequest, PartResult] | PartRequest | BaseException | None]
"""Messages of threads: a request began or ended, an exception, and None: this thread is over."""


class LocalExecutor:
    """Run trials on this machine.

    Args:
        jobs: measured trials in parallel, at most one a GPU.
        deadline_s: no trial starts later (``time.monotonic``).
    """

    def __init__(self, device: str, jobs: int | None = None, deadline_s: float = math.inf):
        self._device, self._deadline_s = device, deadline_s
        gpus = [] if device == "cpu" else visible_gpus()
        if jobs is not None and gpus and jobs > len(gpus):
            raise InputError(
                f"this machine shows {len(gpus)} GPUs, and two trials on one would disturb each other",
                f"use --jobs {len(gpus)} or fewer", field="jobs", value=jobs,
            )  # fmt: skip
        self._places: list[str | None] = [*gpus] if gpus else [None]
        if jobs is not None:
            self._places = self._places[:jobs] if gpus else [None] * jobs

    def run(
        self, requests: Sequence[PartRequest], *, stop: Stop, on_start: OnStart
    ) -> Iterator[tuple[PartRequest, PartResult]]:
        """Run them all, of one stage; yields as they end, and ends early when ``stop`` says so."""
        if not requests:
            return
        predicting = requests[0].part == "predict"
        environments = self._predicting(len(requests)) if predicting else self._measuring(len(requests))
        role = "predict" if predicting else "device"
        waiting: queue.SimpleQueue[PartRequest] = queue.SimpleQueue()
        for request in requests:
            waiting.put(request)
        events: Events = queue.SimpleQueue()
        halt = threading.Event()
        threads = [
            threading.Thread(
                target=_serve,
                args=(role, self._device, one, waiting, events, halt, self._deadline_s),
                daemon=True,
            )
            for one in environments
        ]
        for thread in threads:
            thread.start()
        try:
            yield from _ends(events, len(threads), stop, halt, on_start)
        finally:
            halt.set()
            for thread in threads:
                thread.join()

    def _predicting(self, count: int) -> list[dict[str, str]]:
        number = min(count, MAX_PREDICTIONS, len(os.sched_getaffinity(0)))
        return [{"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}] * number

    def _measuring(self, count: int) -> list[dict[str, str]]:
        return [{} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu} for gpu in self._places[:count]]


def _ends(
    events: Events, num_threads: int, stop: Stop, halt: threading.Event, on_start: OnStart
) -> Iterator[tuple[PartRequest, PartResult]]:
    """Yield the results that the threads report, until each has ended (None)."""
    while num_threads:
        if stop():
            halt.set()
        try:
            one = events.get(timeout=POLL_S)
        except queue.Empty:
            continue
        if one is None:
            num_threads -= 1
        elif isinstance(one, BaseException):
            raise one
        elif isinstance(one, PartRequest):
            on_start(one)
        else:
            yield one


def _serve(
    role: str,
    device: str,
    environment: dict[str, str],
    waiting: "queue.SimpleQueue[PartRequest]",
    events: Events,
    halt: threading.Event,
    deadline_s: float,
) -> None:
    """Serve requests by one worker process until none is left; the worker ends with its thread."""
    slot: Slot | None = None
    try:
        while not halt.is_set() and time.monotonic() < deadline_s:
            try:
                request = waiting.get_nowait()
            except queue.Empty:
                break
            slot = slot if slot is not None and slot.alive else Slot(role, device, environment)
            slot.await_ready(halt)
            if halt.is_set():
                break
            events.put(request)
            result = slot.run(request, halt)
            if result is not None:
                events.put((request, result))
    except Exception as error:  # Raised again where the results are read.
        events.put(error)
    finally:
        if slot is not None:
            slot.close()
        events.put(None)


class Slot:
    """The other end of slot.py's process."""

    def __init__(self, role: str, device: str, environment: dict[str, str]):
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the slot
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, role, device],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, bufsize=0,
            env={**os.environ, **environment}, start_new_session=True,
        )  # fmt: skip
        self._ready = False
        self._said = b""

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def await_ready(self, halt: threading.Event) -> None:
        """Wait for its imports.

        Raises:
            RuntimeError: it ended before it was ready.
        """
        if self._ready or halt.is_set():
            return
        line = self._line(halt, None)
        if line is None and not halt.is_set():
            raise RuntimeError(f"no trial can be started here: {self._last_words()}")
        assert halt.is_set() or line == READY, f"a slot begins with {READY!r}, not {line!r}"
        self._ready = True

    def run(self, request: PartRequest, halt: threading.Event) -> PartResult | None:
        """The request's result; None: it was halted, and nothing is known."""
        began_s = time.monotonic()
        assert self._process.stdin is not None, "opened as a pipe"
        try:
            self._process.stdin.write(request.model_dump_json().encode() + b"\n")
            line = self._line(halt, began_s + request.timeout_s + GRACE_S)
        except BrokenPipeError:
            line = None
        if halt.is_set() and line is None:
            return None
        if line is not None:
            return parse(PartResult, json.loads(line))
        seconds = time.monotonic() - began_s
        if seconds > request.timeout_s + GRACE_S:
            self.close()
            return ended(request, "timeout", "neither the trial nor its worker came to an end", seconds)
        return ended(request, "lost", f"its worker ended: {self._last_words()}", seconds)

    def _line(self, halt: threading.Event, deadline_s: float | None) -> str | None:
        """The next line it writes; None: it ended, the deadline passed, or ``halt``."""
        assert self._process.stdout is not None, "opened as a pipe"
        with selectors.DefaultSelector() as ready:
            ready.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._said:
                if halt.is_set() or (deadline_s is not None and time.monotonic() > deadline_s):
                    return None
                if ready.select(POLL_S):
                    more = os.read(self._process.stdout.fileno(), 1 << 16)
                    self._said += more
                    if not more:
                        return None
                elif not self.alive:  # A grandchild may still hold the pipe's other end.
                    return None
        line, _, self._said = self._said.partition(b"\n")
        return line.decode()

    def close(self) -> None:
        """End it and its trial: in order, and by force where that takes too long."""
        if self.alive:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(LEAVE_S)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            if pipe is not None:
                pipe.close()

    def _last_words(self) -> str:
        code = self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()[-4:]
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        return f"{how}: {' / '.join(lines)}".rstrip(": ")
