"""The server's end of the process that traces: turns, progress, bounds, and ending what nobody waits for."""

import asyncio
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

from trainfit.spec.units import format_bytes
from trainfit.web import tracer
from trainfit.web.limits import Bounds
from trainfit.web.questions import Question

LONGEST_LINE = 2**26
TICK_S = 0.4
"""Time between two lines of progress, and between two looks at a process's memory."""
PATIENCE_S = 5.0
"""Time in which an ended fork must be gone, else the process is started anew."""
FAILED = "this is a bug in trainfit; the terminal that runs trainfit serve shows where"

Event = dict[str, Any]
"""Sent of a traced question: ``{"progress": ...}``, last ``{"answer": ...}`` or ``{"error": ...}``."""


_NUMBERS = itertools.count(1)
"""Of questions: no answer is ever taken for that of another question."""


class BusyError(Exception):
    """Too many questions wait already."""


class Tracing:
    """Questions that are traced, one at a time, in the order in which they came."""

    def __init__(self, bounds: Bounds):
        self.bounds = bounds
        self._process: asyncio.subprocess.Process | None = None
        self._starting: asyncio.Task[asyncio.subprocess.Process] | None = None
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self.num_ended = 0
        """Questions that were ended before they were answered."""

    def warm_up(self) -> None:
        """Begin to start the process, which imports torch for some seconds."""
        if self._process is None and self._starting is None:
            self._starting = asyncio.create_task(_started())

    async def close(self) -> None:
        """End the process, and what it traces."""
        if self._starting is not None:
            with suppress(Exception):
                self._process = await self._starting
        process = self._process
        self._drop()
        if process is not None:
            await process.wait()

    async def events(self, question: Question) -> AsyncGenerator[Event, None]:
        """Answer a question in the process; yield progress, then the answer or an error.

        Closing the iterator ends the trace.

        Raises:
            BusyError: too many questions wait.
        """
        if self._num_waiting >= self.bounds.waiting:
            raise BusyError
        began = time.monotonic()
        turn = asyncio.create_task(self._turn.acquire())
        self._num_waiting += 1
        try:
            while not turn.done():
                await asyncio.wait([turn], timeout=TICK_S)
                if not turn.done():
                    yield _progress("waiting: another question is being traced", began)
        except BaseException:
            if not turn.cancel():  # Its turn came at the same moment.
                self._turn.release()
            raise
        finally:
            self._num_waiting -= 1
        try:
            async with aclosing(self._answered(question)) as events:
                async for event in events:
                    yield event
        finally:
            self._turn.release()

    async def _answered(self, question: Question) -> AsyncGenerator[Event, None]:
        began = time.monotonic()
        self.warm_up()
        if self._starting is not None:
            while not self._starting.done():
                await asyncio.wait([self._starting], timeout=TICK_S)
                yield _progress("starting: PyTorch is imported", began)
            self._process, self._starting = self._starting.result(), None
        assert self._process is not None
        fork = _Fork(self._process, question)
        latest = "one training step on the virtual GPU"
        try:
            while not fork.is_answered:
                found = await fork.content(TICK_S)
                if found is None and (problem := self._problem(fork.child, began)) is not None:
                    yield {"error": {"text": problem}}
                    return
                latest = (found or {}).get("say", latest)
                yield _last(found) if found and fork.is_answered else _progress(latest, began)
        finally:
            await _to_its_end(self._finish(fork))

    async def _finish(self, fork: "_Fork") -> None:
        """End a fork that nobody waits for, and see that the process takes the next question."""
        if not fork.is_answered:
            self.num_ended += 1
            await fork.end()
        if not await fork.ended():
            self._drop()
            self.warm_up()

    def _problem(self, child: int | None, began: float) -> str | None:
        """Return which bound the fork exceeds; None: none."""
        if time.monotonic() - began > self.bounds.seconds:
            return f"not answered within {self.bounds.seconds:g} s; trainfit serve --limit allows more"
        if child is not None and _resident(child) > self.bounds.memory_bytes:
            return f"needs more than {format_bytes(self.bounds.memory_bytes)} of this machine's memory"
        return None

    def _drop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process = None


async def _started() -> asyncio.subprocess.Process:
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {
        **os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",  # It needs no GPU, which imports (torchao) would initialise.
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error",
    }  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", tracer.PROGRAM, env=environment, start_new_session=True, limit=LONGEST_LINE,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    while line := await process.stdout.readline():
        if "ready" in _content(line):
            break
    return process


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Await work that must be done even where the one who awaits it is cancelled meanwhile."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


class _Fork:
    """One question in the process, from its line to the line that reports the end of its fork."""

    def __init__(self, process: asyncio.subprocess.Process, question: Question):
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._lines = process, process.stdout
        self._number = next(_NUMBERS)
        self._reading: asyncio.Task[bytes] | None = None
        self._is_over = False
        self.is_answered = False
        self.child: int | None = None
        process.stdin.write((json.dumps({"number": self._number, **question.as_json()}) + "\n").encode())

    async def content(self, seconds: float) -> dict[str, Any] | None:
        """Return the content of the next line; None: there is none yet. At the end ``{"end": ...}``."""
        if self._is_over:
            return {"end": "closed"}
        self._reading = self._reading or asyncio.create_task(self._lines.readline())
        await asyncio.wait([self._reading], timeout=seconds)
        if not self._reading.done():
            return None
        line, self._reading = self._reading.result(), None
        found: dict[str, Any] = _content(line) if line else {"end": "closed"}
        if line and found.get("number") != self._number:
            return {}  # Of a question before it.
        self.child = found.get("pid", self.child)
        self._is_over = "end" in found
        self.is_answered = self.is_answered or bool(found.keys() & {"answer", "refused", "failed", "end"})
        return found

    async def end(self) -> None:
        """End the fork, as soon as its number is known."""
        while self.child is None and not self._is_over:
            if await self.content(PATIENCE_S) is None:
                return
        if self.child is not None and not self._is_over:
            with suppress(ProcessLookupError):
                os.killpg(self.child, signal.SIGKILL)

    async def ended(self) -> bool:
        """Return whether the fork has ended and the process takes another question."""
        while not self._is_over:
            if await self.content(PATIENCE_S) is None:
                break
        return self._is_over and not self._lines.at_eof()


def _content(line: bytes) -> dict[str, Any]:
    """Return a line's content; of the piece of a line that a process was ended in, nothing."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _progress(text: str, began: float) -> Event:
    return {"progress": {"text": text, "seconds": round(time.monotonic() - began, 1)}}


def _last(found: dict[str, Any]) -> Event:
    if "answer" in found:
        return {"answer": found["answer"]}
    if "refused" in found:
        return {"error": found["refused"]}
    if "end" in found:
        return {
            "error": {"text": f"the process that traces ended ({found['end']}), perhaps for lack of memory"}
        }
    return {"error": {"text": f"{found['failed']}: {FAILED}"}}


def _resident(process: int) -> int:
    """Return the resident bytes of a process; 0 where the system does not say."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
