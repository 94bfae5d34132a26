"""Run a function in a fork of this process, while this process goes on."""

import os
import pickle
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from trainfit.virtual import own_process


def can_fork() -> bool:
    """Return whether a fork is safe (no other thread may hold a lock) and runs at the same time."""
    if sys.platform != "linux" or not own_process.is_own_process:
        return False
    if own_process.has_threads() or own_process.autograd_has_threads():
        return False
    return len(os.sched_getaffinity(0)) > 1


def begin(function: Callable[[], Any]) -> Callable[[], Any]:
    """Start a function in a fork; what is returned waits for its result, or raises its exception."""
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
