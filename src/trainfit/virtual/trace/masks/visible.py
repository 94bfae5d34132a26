"""How much of a mask is visible: the share of its elements that leave a query-key pair in.

The rows of a mask that follows from positions see more and more keys, equally many, or start anew. So the counts of a few rows,
and of more where these do not lie on a line, tell all of them.
"""

from fractions import Fraction
from itertools import pairwise

import torch
from torch import Tensor

from trainfit.virtual.trace.masks.rules import Expression

HIDING = -1e9
"""Added to a score it hides the pair; in fp16, whose lowest number is -65,504, half of that does. A bias (ALiBi) is smaller."""
COUNTED_WHOLE = 1 << 16
"""Elements of a matrix up to which every row is counted."""
AT_ONCE = 1 << 22
"""Elements computed at a time."""
INTERVALS = 16


def visible_share(mask: Expression) -> Fraction:
    """Share of the pairs that the mask leaves: True in a boolean mask, not a very low number in one that is added.

    Masks of the first and the last batch entry and head stand for all.
    """
    if not mask.shape or 0 in mask.shape:
        return Fraction(1)
    rows, columns = (1, *mask.shape)[-2:]
    leading = mask.shape[:-2]
    ends = {tuple(0 for _ in leading), tuple(n - 1 for n in leading)}
    seen = sum(_seen(mask, end, rows, columns) for end in ends)
    return Fraction(seen, len(ends) * rows * columns)


def _seen(mask: Expression, leading: tuple[int, ...], rows: int, columns: int) -> int:
    counts: dict[int, int] = {}

    def look(at: list[int]) -> None:
        at = [row for row in dict.fromkeys(at) if row not in counts]
        size = max(1, AT_ONCE // columns)
        for first in range(0, len(at), size):
            chunk = at[first : first + size]
            counts.update(zip(chunk, _count(mask, leading, chunk, columns), strict=True))

    if rows * columns <= COUNTED_WHOLE:
        look(list(range(rows)))
        return sum(counts.values())
    known = sorted({rows * number // INTERVALS for number in range(INTERVALS)} | {rows - 1})
    look(known)
    total, intervals = sum(counts.values()), list(pairwise(known))
    while intervals := [(a, b) for a, b in intervals if b - a > 1]:
        look([row for a, b in intervals for row in _within(a, b)])
        bent: list[tuple[int, int]] = []
        for a, b in intervals:
            inner = _within(a, b)
            if all(
                (counts[row] - counts[a]) * (b - a) == (counts[b] - counts[a]) * (row - a) for row in inner
            ):
                total += (counts[a] + counts[b]) * (b - a - 1) // 2
            else:
                total += sum(counts[row] for row in inner)
                bent += pairwise((a, *inner, b))
        intervals = bent
    return total


def _within(a: int, b: int) -> list[int]:
    """Rows between two, at distances that no period of a mask divides evenly."""
    return sorted({a + 1, b - 1, a + (b - a) * 382 // 1000, a + (b - a) * 711 // 1000} - {a, b})


def _count(mask: Expression, leading: tuple[int, ...], rows: list[int], columns: int) -> list[int]:
    column = torch.arange(columns)
    at: tuple[Tensor, ...] = (*(torch.tensor(n) for n in leading), torch.tensor(rows)[:, None], column)
    values = mask.at(at[-len(mask.shape) :])
    if values.dtype == torch.bool:
        seen = values
    elif values.is_floating_point():
        seen = values > max(HIDING, torch.finfo(values.dtype).min / 2)
    else:
        seen = values > HIDING
    return seen.expand(len(rows), columns).sum(1).tolist()
