"""Run a function in a fork of this process, while this process goes on; find out whether a fork is safe.

Importing this module imports no torch.
"""

import os
import pickle
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from trainfit.spec.printable import PROGRESS_THREAD

OF_AUTOGRAD = "pt_autograd"
"""Prefix of the names of autograd's threads (torch/csrc/autograd/engine.cpp)."""
DAEMONS = ("tqdm_monitor", PROGRESS_THREAD)
"""Names of threads that do not prevent a fork, because they sleep nearly all the time."""
_allowed = False


def allow() -> None:
    """Let ``can_fork`` be true in this process, which was started for one command.

    A user's own process is never forked, because its threads and libraries are unknown.
    """
    global _allowed
    _allowed = True


def can_fork() -> bool:
    """Return whether a fork is allowed, safe (no other thread may hold a lock) and runs at the same time."""
    if sys.platform != "linux" or not _allowed or has_threads() or autograd_has_threads():
        return False
    import torch

    # After a fork CUDA can be neither used nor queried for a GPU's properties.
    return not torch.cuda.is_initialized() and len(os.sched_getaffinity(0)) > 1


def has_threads() -> bool:
    """Return whether Python threads run in addition to the main one and ``DAEMONS``."""
    main = threading.main_thread()
    return any(each is not main and each.name not in DAEMONS for each in threading.enumerate())


def autograd_has_threads() -> bool:
    """Return whether autograd runs threads, for GPUs: then no fork of this process can run a backward.

    The first backward of a process starts them, one for each GPU that PyTorch sees.
    """
    for thread in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # It ended meanwhile.
            if thread.read_text().startswith(OF_AUTOGRAD):
                return True
    return False


def begin(function: Callable[[], Any]) -> Callable[[], Any]:
    """Start a function in a fork; return a function that waits for its result, or raises its exception."""
    results, answer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(results)
        _answer(function, answer)
    os.close(answer)

    def result() -> Any:
        with os.fdopen(results, "rb") as pipe:
            written = pipe.read()
        os.waitpid(pid, 0)
        if not written:
            raise RuntimeError("a process that generates code ended")
        value, error = pickle.loads(written)
        if error is not None:
            raise error
        return value

    return result


def _answer(function: Callable[[], Any], answer: int) -> NoReturn:
    code = 1
    try:
        try:
            written = pickle.dumps((function(), None))
        except Exception as error:
            written = pickle.dumps((None, error))
        with os.fdopen(answer, "wb") as pipe:
            pipe.write(written)
        code = 0
    finally:
        os._exit(code)
