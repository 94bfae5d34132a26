"""Statistics of relative errors, and how they are written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import quantiles


def share(value: float, *, signed: bool = False) -> str:
    """Return a share in per cent; only what is 0 reads 0."""
    size = abs(value)
    if size == 0:
        return "0 %"
    if size < 1e-6:
        return "< 0.0001 %"
    sign = "-" if value < 0 else "+" if signed else ""
    return f"{sign}{size * 100:.{2 if size >= 1e-3 else 4}f} %"


def in_head(per_cent: str) -> str:
    """Return a share without its unit, which the column's head names."""
    return per_cent.removesuffix(" %").replace("< ", "<")


def percentile_95(values: Sequence[float]) -> float:
    """Return the 95th percentile of the values' sizes."""
    return quantiles(map(abs, values), n=20, method="inclusive")[-1]


def worst(values: Iterable[float]) -> float:
    """Return the value of the largest size, with its sign."""
    return max(values, key=abs)


def exact(values: Sequence[float]) -> int:
    """Return how many are predicted to the byte."""
    return sum(value == 0 for value in values)
