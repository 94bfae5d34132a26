"""How often a rollout reads prompts and appends tokens, from the lengths of its completions. No torch here.

The schedule is that of ``Generator``: a slot takes the next prompt once its sequence has ended, which is
looked at every few steps; slots that have ended compute along.
"""

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

PAD = 64
"""Prompts are padded to a multiple of so many positions."""
READ_EVERY = 8
"""Steps between two looks at which sequences have ended."""


class Schedule(NamedTuple):
    """The calls of a rollout on one GPU.

    Attributes:
        prefills: prompts that each call reads; widths: tokens of the longest of them.
        steps: calls that append a token to every slot.
        positions: positions of the cache that a step reads, summed over slots, on average.
        kept: tokens of completions.
    """

    prefills: tuple[int, ...]
    widths: tuple[int, ...]
    steps: int
    positions: float
    kept: int


def padded(positions: int) -> int:
    """Return the positions of a sequence in the cache."""
    return -(-positions // PAD) * PAD


def schedule(slots: int, prompts: Sequence[int], lengths: Sequence[int], max_new: int) -> Schedule:
    """Return the calls that generate completions of these lengths, in their order.

    Args:
        prompts: tokens of each prompt.
        lengths: tokens of each completion, at least 1.
        max_new: that a completion may have.

    Example: two slots, completions of 2, 5 and 2 tokens, looked at in each step: the third prompt begins when
    the first completion has ended::

        prefills (2, 1), 5 steps
    """
    waiting = list(reversed(list(zip(prompts, lengths, strict=True))))
    running = [0] * slots  # Tokens that each slot still makes
    filled, prefills, widths, steps, positions = [0] * slots, list[int](), list[int](), 0, 0
    num = min(READ_EVERY, max_new - 1)
    while waiting or any(running):
        free = [slot for slot in range(slots) if not running[slot]][: len(waiting)]
        for slot in free:
            # The first token comes with the prompt.
            filled[slot], length = waiting.pop()
            running[slot] = length - 1
        if free:
            prefills.append(len(free))
            widths.append(max(filled[slot] for slot in free))
        steps += num
        for slot in range(slots):
            grown = min(running[slot], num)
            # Step j reads filled + min(j, grown) + 1 positions, j from 0.
            positions += num * (filled[slot] + 1 + grown) - grown * (grown + 1) // 2
            running[slot] -= grown
            filled[slot] += grown
    return Schedule(tuple(prefills), tuple(widths), steps, positions / steps if steps else 0.0, sum(lengths))


def of_mean(mean: float, longest: int, count: int) -> list[int]:
    """Return lengths with a mean, cut at the longest: each token ends a completion with equal probability.

    They are evenly spaced quantiles of the exponential distribution, in a fixed random order.
    """
    if mean >= longest:
        return [longest] * count
    scale = _scale(max(mean, 1.0), longest)
    shares = [(number + 0.5) / count for number in range(count)]
    found = [min(longest, max(1, round(-scale * math.log1p(-share)))) for share in shares]
    random.Random(0).shuffle(found)
    return found


def _scale(mean: float, longest: int) -> float:
    """Return the scale of the exponential distribution whose mean is this when it is cut at the longest."""
    low, high = 0.0, 1e6 * longest
    for _ in range(200):
        middle = (low + high) / 2
        if middle * -math.expm1(-longest / middle) < mean:
            low = middle
        else:
            high = middle
    return high
