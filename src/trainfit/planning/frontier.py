"""The Pareto frontier of memory against speed."""

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def pareto(items: Iterable[T], of: Callable[[T], tuple[float, float]]) -> list[T]:
    """Return the items that no other beats in both, by ascending memory.

    Args:
        of: memory (less is better) and speed (more is better) of an item.
    """
    kept: list[T] = []
    fastest = float("-inf")
    for item in sorted(items, key=lambda one: (of(one)[0], -of(one)[1])):
        if of(item)[1] > fastest:
            kept.append(item)
            fastest = of(item)[1]
    return kept
