"""Command lines run one after another, each in a fork of a process that has imported everything, within limits.

Run as a program: a request a line on standard input (``arguments``, ``seconds``), an answer a line on standard output.
Forking after the imports makes a case cost what the command itself does. The parent starts no thread, so forks are safe.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

MEMORY_BYTES = 10**9
"""Address space that a command may take beyond what the imported libraries have."""


@dataclass(frozen=True)
class Ending:
    """How one command line ended: exit code (negative: the signal), what it printed, CPU seconds."""

    code: int
    out: str
    err: str
    cpu_s: float
    wall_s: float


class Worker:
    """The process that forks; a context manager."""

    def __init__(self, folder: Path):
        self._folder = folder

    def __enter__(self) -> "Worker":
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=self._folder, text=True,
            env=os.environ | {"TRAINFIT_CACHE": str(self._folder / "cache"), "COLUMNS": "200"},
        )  # fmt: skip
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def run(self, *arguments: str, seconds: int = 60) -> Ending:
        """The ending of ``trainfit ARGUMENTS``; SIGALRM ends it after ``seconds``."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"arguments": arguments, "seconds": seconds}) + "\n")
        self._process.stdin.flush()
        return Ending(**json.loads(self._process.stdout.readline()))


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import numpy  # noqa: F401
    import peft  # noqa: F401
    import torch
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama  # noqa: F401

    import trainfit.prediction.estimate
    import trainfit.prediction.trace
    import trainfit.training.loop  # noqa: F401

    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        answers.write(json.dumps(_ending(request["arguments"], request["seconds"])) + "\n")
        answers.flush()


def _ending(arguments: list[str], seconds: int) -> dict[str, Any]:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        start_s = time.monotonic()
        child = os.fork()
        if child == 0:
            _run(arguments, seconds, out.fileno(), err.fileno())
        _, status, memory_stats = os.wait4(child, 0)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read(10**6).decode(errors="replace"))
        return {
            "code": os.waitstatus_to_exitcode(status), "out": texts[0], "err": texts[1],
            "cpu_s": memory_stats.ru_utime + memory_stats.ru_stime, "wall_s": time.monotonic() - start_s,
        }  # fmt: skip


def _run(arguments: list[str], seconds: int, out: int, err: int) -> None:
    """In the child: never returns."""
    code = 99
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(seconds)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        from trainfit.cli.main import main

        code = main(arguments)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    _serve()
