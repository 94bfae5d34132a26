"""What an environment is: numbered tasks in text, and the reward of an answer.

Both methods are pure functions of the task's number (and of what the environment was made with), so a run
that is resumed sees the same tasks and rewards, and workers in other processes need no state.

Example: the whole of an environment of one's own, ``count.py``, used as ``environment: count.py:Count``::

    class Count:
        def prompt(self, number: int) -> str:
            return f"{number % 90} "

        def reward(self, number: int, completion: str) -> float:
            return float(completion.strip() == str(number % 90 + 1))

A reward of several parts is a mapping, such as ``{"legal": 1.0, "material": 0.4}``: their sum counts, and the
log has each. A class whose constructor takes ``seed`` gets the recipe's. An attribute ``neighbours`` says how
many tasks in a row share work, such as one game's: they go to one worker process.

An environment of a game may have a third method, ``games`` (below), for ``trainfit evaluate --games``: a
generator that plays all games at once. It yields the prompts of those in which the model is to move, is sent
its answers, and returns the results.
"""

from collections.abc import Generator, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable


class Environment(Protocol):
    """Numbered tasks."""

    def prompt(self, number: int) -> str:
        """Return the text that the model continues; number >= 0."""
        ...

    def reward(self, number: int, completion: str) -> float | Mapping[str, float]:
        """Return the reward of an answer, without the token that ended it, or its parts by name."""
        ...


class Result(NamedTuple):
    """How a game ended.

    Attributes:
        outcome: 1 the model won, -1 it lost, 0 a draw, or too long.
        moves: of both sides.
        illegal: the model lost by an answer that is no legal move.
    """

    outcome: int
    moves: int
    illegal: bool


@runtime_checkable
class Games(Protocol):
    """An environment whose model can play whole games."""

    def games(self, count: int, limit: int) -> Generator[list[str], Sequence[str], list[Result]]:
        """Play ``count`` games of at most ``limit`` moves, the model on both sides in turn."""
        ...
