"""Sums and differences of small numbers, which need no library."""

import random


class Arithmetic:
    """``17+5=``, answered by ``22``.

    Args:
        largest: number of a task.
        seed: tasks of another seed are others.
    """

    def __init__(self, largest: int = 99, seed: int = 0):
        self.largest, self.seed = largest, seed

    def prompt(self, number: int) -> str:
        """Return a task."""
        a, b, sign = self._task(number)
        return f"{a}{sign}{b}="

    def reward(self, number: int, completion: str) -> float:
        """Return 1 for the answer, 0.1 for another number, else 0."""
        a, b, sign = self._task(number)
        answer = completion.strip()
        if answer == str(a + b if sign == "+" else a - b):
            return 1.0
        return 0.1 if answer.removeprefix("-").isdecimal() else 0.0

    def _task(self, number: int) -> tuple[int, int, str]:
        choose = random.Random(f"{self.seed} {number}")
        return choose.randint(0, self.largest), choose.randint(0, self.largest), choose.choice("+-")
