"""Rows of a benchmark by what their points have, for tables, plots and sentences that need some of them."""

from collections.abc import Iterable, Mapping, Sequence

from trainfit.spec.bench import BenchRow, Cell

SIZES = ("small", "medium", "large", "xl", "2.7b")
"""The course's models, the smallest first."""
PRECISIONS = ("fp32", "tf32", "amp-bf16", "bf16")
"""From the most bits to the fewest."""
COMPILES = {"false": "eager", "block": "blocks", "model": "whole model"}
"""A recipe's ``compile`` in words."""
Order = Mapping[str, Sequence[Cell]]
"""Keys of a point, the first one first, and their values in order; a value that is not there comes after those, numbers by size."""


def having(rows: Iterable[BenchRow], point: Mapping[str, Cell]) -> list[BenchRow]:
    """Rows whose points have all of ``point``."""
    return [
        row for row in rows if all(key in row.point and row.point[key] == cell for key, cell in point.items())
    ]


def median_s(rows: Iterable[BenchRow], point: Mapping[str, Cell], *, steady: bool = False) -> float | None:
    """The median of the one row with ``point``; None: there is none, or it has no time. ``steady``: nor an unsteady one."""
    for row in having(rows, point):
        if row.times is not None and row.status in (("done",) if steady else ("done", "unsteady")):
            return row.times.median
    return None


def number(row: BenchRow, name: str) -> float | None:
    """A number of the row; None: it has none of that name."""
    found = row.numbers.get(name)
    return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else None


def rate_text(rate: float) -> str:
    """A rate without decimals, but two digits of a small one: ``1,255``, ``0.17``."""
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


def values(rows: Iterable[BenchRow], key: str) -> list[Cell]:
    """The values of ``key`` in the rows' points, each once, in their order."""
    return list(dict.fromkeys(row.point[key] for row in rows if key in row.point))


def in_order(rows: Sequence[BenchRow], order: Order) -> list[BenchRow]:
    """Rows by ``order``; rows that are equal in it stay as they are."""
    there = {key: [*known, *_others(values(rows, key), known)] for key, known in order.items()}

    def place(row: BenchRow) -> tuple[int, ...]:
        return tuple(at.index(row.point[key]) if key in row.point else -1 for key, at in there.items())

    return sorted(rows, key=place)


def _others(found: list[Cell], known: Sequence[Cell]) -> list[Cell]:
    others = [cell for cell in found if cell not in known]
    numbers = all(isinstance(cell, int | float) for cell in others)
    return sorted(others, key=float) if numbers else others


def low_to_high(pairs: Sequence[tuple[float, str]], digits: int = 2) -> str:
    """``1.20 (small) to 3.40 (2.7b)``; one value once."""
    (low, at_low), (high, at_high) = min(pairs), max(pairs)
    if len(pairs) == 1:
        return f"{low:.{digits}f} ({at_low})"
    return f"{low:.{digits}f} ({at_low}) to {high:.{digits}f} ({at_high})"
