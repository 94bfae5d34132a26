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
log has each. A class whose constructor takes ``seed`` gets the recipe's.
"""

from collections.abc import Mapping
from typing import Protocol


class Environment(Protocol):
    """Numbered tasks."""

    def prompt(self, number: int) -> str:
        """Return the text that the model continues; number >= 0."""
        ...

    def reward(self, number: int, completion: str) -> float | Mapping[str, float]:
        """Return the reward of an answer, without the token that ended it, or its parts by name."""
        ...
