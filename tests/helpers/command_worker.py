"""Run command lines one after another, each in a fork of a process that has imported everything.

Run as a program: a request a line on standard input, an answer a line on standard output. Forking after the
imports makes a case cost what the command itself does. The parent starts no thread, so forks are safe.
"""

import gc
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MEMORY_BYTES = 10**9  # Address space that a command may take in addition to that of the imported libraries


IMPORTS = (
    "numpy", "peft", "torch", "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama", "trainfit.api.calls", "trainfit.cli.main",
    "trainfit.prediction.predict", "trainfit.prediction.trace", "trainfit.training.loop",
)  # fmt: skip


@dataclass(frozen=True)
class Ending:
    """Result of one command line: exit code (negative: the signal), output and processor time."""

    code: int
    out: str
    err: str
    cpu_s: float


class Worker:
    """Context manager around the process that forks."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __enter__(self) -> "Worker":
        self._process = subprocess.Popen(
            [sys.executable, __file__], cwd=self.folder,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"COLUMNS": "200"},
        )  # fmt: skip
        self.pid = self._process.pid
        return self

    def __exit__(self, *_: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def run(
        self,
        *arguments: str,
        seconds: int = 60,
        folder: Path | None = None,
        memory_bytes: int | None = MEMORY_BYTES,
        file_bytes: int | None = None,
        out: str | None = None,
        first: str = "",
    ) -> Ending:
        """Run ``trainfit ARGUMENTS``.

        Args:
            seconds: a signal ends the command after this processor time, or ten times as long.
            folder: its working directory.
            memory_bytes: its limit on address space, in addition to the imported libraries.
            file_bytes: its limit on the size of a file.
            out: file that is its standard output.
            first: Python code that it runs first.
        """
        request = {
            "arguments": arguments, "seconds": seconds, "folder": str(folder or self.folder), "out": out,
            "memory_bytes": memory_bytes, "file_bytes": file_bytes, "first": first,
        }  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Ending(**json.loads(self._process.stdout.readline()))


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for module in IMPORTS:
        importlib.import_module(module)
    sys.modules["torch"].set_num_threads(1)
    gc.freeze()  # A collection in a fork would copy all of this memory.
    for line in sys.stdin:
        answers.write(json.dumps(_ending(json.loads(line))) + "\n")
        answers.flush()


def _ending(request: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            _run(request, out.fileno(), err.fileno())
        _, status, usage = os.wait4(child, 0)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read(10**6).decode(errors="replace"))
        return {
            "code": os.waitstatus_to_exitcode(status), "out": texts[0], "err": texts[1],
            "cpu_s": usage.ru_utime + usage.ru_stime,
        }  # fmt: skip


def _run(request: dict[str, Any], out: int, err: int) -> None:
    """Run the command in the child; never returns."""
    code = 99
    try:
        os.chdir(request["folder"])
        os.dup2(os.open(request["out"], os.O_WRONLY) if request["out"] else out, 1)
        os.dup2(err, 2)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10 * request["seconds"])
        resource.setrlimit(resource.RLIMIT_CPU, (request["seconds"],) * 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # Background jobs ignore it.
        if request["memory_bytes"] is not None:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + request["memory_bytes"]
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        if request["file_bytes"] is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_bytes"],) * 2)
        exec(request["first"], {})
        from trainfit.cli.entry import main

        sys.argv[1:] = request["arguments"]
        code = main()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    _serve()
