"""Difference of two explained peaks, by holder."""

from typing import NamedTuple

from trainfit.spec.result import Explanation


class Change(NamedTuple):
    """A holder's bytes in the second explanation minus those in the first."""

    category: str
    path: str
    op: str
    made_in: str
    num_bytes: int


def difference(first: Explanation, second: Explanation) -> list[Change]:
    """Return the holders that differ, the largest change first; equal names are the same holder."""
    totals: dict[tuple[str, str, str, str], int] = {}
    for sign, one in ((-1, first), (1, second)):
        for holder in one.holders:
            key = (holder.category, holder.path, holder.op, holder.made_in)
            totals[key] = totals.get(key, 0) + sign * holder.num_bytes
    changes = [Change(*key, num_bytes) for key, num_bytes in totals.items() if num_bytes]
    return sorted(changes, key=lambda change: (-abs(change.num_bytes), change))
