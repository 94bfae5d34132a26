"""An environment in worker processes, for one whose tasks take longer than the GPU's work on them."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from typing import Any, Self

from trainfit.measurement.process import die_with_parent
from trainfit.rl.environments.load import FIELD, failure_of
from trainfit.rl.environments.protocol import Environment
from trainfit.spec.errors import InputError

AT_ONCE = 16
"""Tasks that a worker is given at a time; neighbours share what the environment caches."""
WHOLE = "reward"
"""Name of the only part of a reward that is one number."""
CORRECT = "correct the environment"

_mine: Environment | None = None


class Pool:
    """Prompts and rewards of many tasks at a time; ``workers`` 0 computes them here.

    Args:
        make: makes the environment, in each worker; a function or class that can be pickled.

    Raises:
        InputError: the environment cannot be made; from the methods, if it raises, or returns no reward.
    """

    def __init__(self, make: Callable[[], Environment], workers: int):
        self._here = make()  # Also with workers: what is wrong is found before they start.
        self._workers: ProcessPoolExecutor | None = None
        if workers:
            # A fork of a process with threads (autograd's, CUDA's) may hang.
            start, arguments = multiprocessing.get_context("spawn"), (make, os.getpid())
            self._workers = ProcessPoolExecutor(workers, start, initializer=_begin, initargs=arguments)

    def prompts(self, numbers: Sequence[int]) -> list[str]:
        """Return the tasks' texts."""
        return self._all(_prompt, numbers)

    def rewards(self, numbers: Sequence[int], completions: Sequence[str]) -> list[dict[str, float]]:
        """Return the parts of each answer's reward, whose sum it is; one number is its only part."""
        return self._all(_reward, numbers, completions)

    def _all(self, function: Callable[..., tuple[Any, str]], *columns: Sequence[Any]) -> list[Any]:
        """Return the function's values of each row; it returns them with a description of a failure."""
        if self._workers is None:
            global _mine
            _mine = self._here
            answers = [function(*row) for row in zip(*columns, strict=True)]
        else:
            try:
                answers = list(self._workers.map(function, *columns, chunksize=AT_ONCE))
            except BrokenProcessPool:
                problem = "a worker process of the environment ended"
                raise InputError(problem, "see its output; use workers: 0 to debug it", field=FIELD) from None
        for _, failure in answers:
            if failure:
                raise InputError(failure, CORRECT, field=FIELD)
        return [value for value, _ in answers]

    def close(self) -> None:
        """End the workers."""
        if self._workers is not None:
            self._workers.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _begin(make: Callable[[], Environment], parent: int) -> None:
    """Make a worker's environment; signals to the group leave it to the training process to end it."""
    global _mine  # The environment of this worker process.
    die_with_parent(parent)
    for number in (signal.SIGTERM, signal.SIGINT):
        with suppress(ValueError):
            signal.signal(number, signal.SIG_IGN)
    _mine = make()


def _prompt(number: int) -> tuple[str, str]:
    assert _mine is not None
    try:
        found = _mine.prompt(number)
    except Exception as error:
        return "", failure_of(error, f"prompt({number})")
    if not isinstance(found, str):
        return "", f"prompt({number}) returned {type(found).__name__}, not text"
    return found, ""


def _reward(number: int, completion: str) -> tuple[dict[str, float], str]:
    assert _mine is not None
    try:
        found: Any = _mine.reward(number, completion)
        parts = dict(found) if isinstance(found, Mapping) else {WHOLE: found}
        parts = {str(name): float(value) for name, value in parts.items()}
    except Exception as error:
        return {}, failure_of(error, f"reward({number}, {completion[:40]!r})")
    if not parts or not all(math.isfinite(value) for value in parts.values()):
        return {}, f"reward({number}, {completion[:40]!r}) returned {found!r}, not a finite number"
    return parts, ""
