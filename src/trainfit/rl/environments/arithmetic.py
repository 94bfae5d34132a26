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

    def reward(self, number: int, completion: str) -> dict[str, float]:
        """Return 0.1 for a number and 0.9 more for the answer."""
        a, b, sign = self._task(number)
        answer = completion.strip()
        is_number = answer.removeprefix("-").isdecimal()
        return {
            "number": 0.1 * is_number,
            "right": 0.9 * (answer == str(a + b if sign == "+" else a - b)),
        }

    def _task(self, number: int) -> tuple[int, int, str]:
        choose = random.Random(f"{self.seed} {number}")
        return choose.randint(0, self.largest), choose.randint(0, self.largest), choose.choice("+-")
