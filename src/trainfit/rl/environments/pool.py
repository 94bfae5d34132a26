"""An environment in worker processes, for one whose tasks take longer than the GPU's work on them.

Neighbouring tasks go to one worker, always the same: what the environment computed for a prompt it has cached
for the rewards of the answers.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from typing import Any, Self

from trainfit.measurement.process import die_with_parent
from trainfit.rl.environments.load import FIELD, failure_of
from trainfit.rl.environments.protocol import Environment
from trainfit.spec.errors import InputError

NEIGHBOURS = 8
"""Tasks in a row that one worker computes, unless the environment says how many of its tasks share work."""
NICE = 10
"""How much workers give way: they compute the next rollout's prompts while the training process, whose small
operations on the CPU wait for all their threads, trains on this one's."""
LOOK_S = 0.2
"""Seconds between two looks at whether a signal ends the wait for workers."""
WHOLE = "reward"
"""Name of the only part of a reward that is one number."""
LARGEST = 1e30
"""No reward may be as large: its square overflows fp32 long before its advantage means anything."""
CORRECT = "correct the environment"

Rows = Callable[[Sequence[Any]], list[tuple[Any, str]]]
"""Returns the value of each row, and a description of its failure, empty if there is none."""

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
        # A fork of a process with threads (autograd's, CUDA's) may hang.
        start, arguments = multiprocessing.get_context("spawn"), (make, os.getpid())
        self._workers = [
            ProcessPoolExecutor(1, start, initializer=_begin, initargs=arguments) for _ in range(workers)
        ]
        self._neighbours = getattr(self._here, "neighbours", NEIGHBOURS)
        self._begun: dict[tuple[int, ...], list[Future[Any]]] = {}

    def prompts(self, numbers: Sequence[int]) -> list[str]:
        """Return the tasks' texts."""
        return self._all(_prompts, [(number,) for number in numbers], self._begun.pop(tuple(numbers), None))

    def begin(self, numbers: Sequence[int]) -> None:
        """Let the workers compute texts that ``prompts`` will be called for."""
        self._begun = {}
        if self._workers:
            self._begun[tuple(numbers)] = self._submit(_prompts, [(number,) for number in numbers])

    def rewards(
        self, numbers: Sequence[int], completions: Sequence[str], wait: Callable[[], None] = lambda: None
    ) -> list[dict[str, float]]:
        """Return the parts of each answer's reward, whose sum it is; one number is its only part.

        Args:
            wait: called between the rewards, or while workers compute them; what it raises ends the wait.
        """
        return self._all(_rewards, list(zip(numbers, completions, strict=True)), wait=wait)

    def _all(
        self,
        function: Rows,
        rows: Sequence[tuple[Any, ...]],
        begun: list[Future[Any]] | None = None,
        wait: Callable[[], None] = lambda: None,
    ) -> list[Any]:
        """Return the function's values of each row, whose first entry is the task's number."""
        if not self._workers:
            global _mine
            _mine = self._here
            answers = list[tuple[Any, str]]()
            for row in rows:
                wait()
                answers += function([row])
        else:
            try:
                parts = [iter(_result(one, wait)) for one in begun or self._submit(function, rows)]
            except BrokenProcessPool:
                problem = "a worker process of the environment ended"
                raise InputError(problem, "see its output; use workers: 0 to debug it", field=FIELD) from None
            answers = [next(parts[self._worker_of(row)]) for row in rows]
        for _, failure in answers:
            if failure:
                raise InputError(failure, CORRECT, field=FIELD)
        return [value for value, _ in answers]

    def _submit(self, function: Rows, rows: Sequence[tuple[Any, ...]]) -> list[Future[Any]]:
        """Give each worker its rows."""
        of_workers: list[list[tuple[Any, ...]]] = [[] for _ in self._workers]
        for row in rows:
            of_workers[self._worker_of(row)].append(row)
        return [one.submit(function, mine) for one, mine in zip(self._workers, of_workers, strict=True)]

    def _worker_of(self, row: tuple[Any, ...]) -> int:
        return row[0] // self._neighbours % len(self._workers)

    def close(self) -> None:
        """End the workers."""
        for one in self._workers:
            one.shutdown(wait=False, cancel_futures=True)
        for one in self._workers:
            one.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _result(future: Future[Any], wait: Callable[[], None]) -> Any:
    """Return the future's result; ``wait`` is called while it is not there."""
    while True:
        wait()
        try:
            return future.result(timeout=LOOK_S)
        except TimeoutError:
            if future.done():  # The environment's own TimeoutError is described by its worker.
                raise


def _begin(make: Callable[[], Environment], parent: int) -> None:
    """Make a worker's environment; signals to the group leave it to the training process to end it."""
    global _mine  # The environment of this worker process.
    die_with_parent(parent)
    os.nice(NICE)
    for number in (signal.SIGTERM, signal.SIGINT):
        with suppress(ValueError):
            signal.signal(number, signal.SIG_IGN)
    _mine = make()


def _prompts(rows: Sequence[tuple[int]]) -> list[tuple[str, str]]:
    return [_prompt(*row) for row in rows]


def _rewards(rows: Sequence[tuple[int, str]]) -> list[tuple[dict[str, float], str]]:
    return [_reward(*row) for row in rows]


def _prompt(number: int) -> tuple[str, str]:
    assert _mine is not None
    try:
        found = _mine.prompt(number)
    except (Exception, SystemExit) as error:
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
    except (Exception, SystemExit) as error:
        return {}, failure_of(error, f"reward({number}, {completion[:40]!r})")
    # Each is logged and their sum is trained on in fp32.
    if not parts or not all(abs(value) < LARGEST for value in (*parts.values(), sum(parts.values()))):
        what = f"returned {found!r}, not a number below {LARGEST:.0e}"
        return {}, f"reward({number}, {completion[:40]!r}) {what}"
    return parts, ""
