"""An environment in worker processes, for one whose tasks take longer than the GPU's work on them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Self

from trainfit.rl.environments.protocol import Environment

AT_ONCE = 16
"""Tasks that a worker is given at a time; neighbours share what the environment caches."""

_mine: Environment | None = None


class Pool:
    """Prompts and rewards of many tasks at a time; ``workers`` 0 computes them here.

    Args:
        make: makes the environment, in each worker; a function or class that can be pickled.
    """

    def __init__(self, make: Callable[[], Environment], workers: int):
        self._here = make() if workers == 0 else None
        self._workers: ProcessPoolExecutor | None = None
        if workers:
            # A fork of a process with threads (autograd's, CUDA's) may hang.
            start = multiprocessing.get_context("spawn")
            self._workers = ProcessPoolExecutor(workers, start, initializer=_begin, initargs=(make,))

    def prompts(self, numbers: Sequence[int]) -> list[str]:
        """Return the tasks' texts."""
        if self._here is not None:
            return [self._here.prompt(number) for number in numbers]
        assert self._workers is not None
        return list(self._workers.map(_prompt, numbers, chunksize=AT_ONCE))

    def rewards(self, numbers: Sequence[int], completions: Sequence[str]) -> list[float]:
        """Return the rewards of the answers."""
        if self._here is not None:
            pairs = zip(numbers, completions, strict=True)
            return [float(self._here.reward(number, text)) for number, text in pairs]
        assert self._workers is not None
        return list(self._workers.map(_reward, numbers, completions, chunksize=AT_ONCE))

    def close(self) -> None:
        """End the workers."""
        if self._workers is not None:
            self._workers.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _begin(make: Callable[[], Environment]) -> None:
    global _mine  # The environment of this worker process.
    _mine = make()


def _prompt(number: int) -> str:
    assert _mine is not None
    return _mine.prompt(number)


def _reward(number: int, completion: str) -> float:
    assert _mine is not None
    return float(_mine.reward(number, completion))
