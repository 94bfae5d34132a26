"""The visible share of a mask: the fraction of query-key pairs that it leaves.

The visible keys of a mask of positions are piecewise linear in the row, so a few rows are counted, and more
where the counts are not on a line.
"""

from fractions import Fraction
from itertools import pairwise

import torch
from torch import Tensor

from trainfit.virtual.trace.masks.expressions import Expression

HIDING = -1e9
"""A pair with a lower additive value is hidden; in fp16 the bound is half the minimum of -65,504. Biases
(ALiBi) are larger."""
SMALL_MATRIX = 1 << 16
"""Elements of a matrix up to which every row is counted."""
CHUNK = 1 << 22
"""Elements computed at a time."""
INTERVALS = 16


def visible_share(mask: Expression) -> Fraction:
    """Return the share of visible pairs of the first and the last batch entry and head.

    Visible is True in a boolean mask, and not below HIDING in an additive one.
    """
    if not mask.shape or 0 in mask.shape:
        return Fraction(1)
    rows, columns = (1, *mask.shape)[-2:]
    leading = mask.shape[:-2]
    ends = {tuple(0 for _ in leading), tuple(n - 1 for n in leading)}
    visible = sum(_num_visible(mask, end, rows, columns) for end in ends)
    return Fraction(visible, len(ends) * rows * columns)


def _num_visible(mask: Expression, leading: tuple[int, ...], rows: int, columns: int) -> int:
    counts: dict[int, int] = {}

    def count(at: list[int]) -> None:
        at = [row for row in dict.fromkeys(at) if row not in counts]
        size = max(1, CHUNK // columns)
        for first in range(0, len(at), size):
            chunk = at[first : first + size]
            counts.update(zip(chunk, _row_counts(mask, leading, chunk, columns), strict=True))

    if rows * columns <= SMALL_MATRIX:
        count(list(range(rows)))
        return sum(counts.values())
    known = sorted({rows * number // INTERVALS for number in range(INTERVALS)} | {rows - 1})
    count(known)
    total, intervals = sum(counts.values()), list(pairwise(known))
    while intervals := [(a, b) for a, b in intervals if b - a > 1]:
        count([row for a, b in intervals for row in _samples(a, b)])
        bent: list[tuple[int, int]] = []
        for a, b in intervals:
            inner, rise = _samples(a, b), counts[b] - counts[a]
            if all((counts[row] - counts[a]) * (b - a) == rise * (row - a) for row in inner):
                total += (counts[a] + counts[b]) * (b - a - 1) // 2
            else:
                total += sum(counts[row] for row in inner)
                bent += pairwise((a, *inner, b))
        intervals = bent
    return total


def _samples(a: int, b: int) -> list[int]:
    """Return rows between two, at distances that no period of a mask divides evenly."""
    return sorted({a + 1, b - 1, a + (b - a) * 382 // 1000, a + (b - a) * 711 // 1000} - {a, b})


def _row_counts(mask: Expression, leading: tuple[int, ...], rows: list[int], columns: int) -> list[int]:
    column = torch.arange(columns)
    at: tuple[Tensor, ...] = (*(torch.tensor(n) for n in leading), torch.tensor(rows)[:, None], column)
    values = mask.at(at[-len(mask.shape) :])
    if values.dtype == torch.bool:
        visible = values
    elif values.is_floating_point():
        visible = values > max(HIDING, torch.finfo(values.dtype).min / 2)
    else:
        visible = values > HIDING
    return visible.expand(len(rows), columns).sum(1).tolist()
