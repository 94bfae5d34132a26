"""Figures in the sentences of a page, found by a pattern."""

import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def sentences(page: str) -> str:
    """Return the text of a page without its tables and markers, on one line."""
    lines = (ROOT / page).read_text("utf-8").splitlines()
    return " ".join(line for line in lines if not line.startswith(("|", "<!--", "!["))).replace("  ", " ")


def figures(page: str, pattern: str) -> tuple[str, ...]:
    """Return what the pattern's groups match; ``#`` stands for a number. The pattern must match once."""
    number = r"([+-]?\\d[\\d,]*(?:\\.\\d+)?)"
    found = re.findall(re.sub("#", number, pattern.replace(" ", r"\s+")), sentences(page))
    assert len(found) == 1, f"{page}: {len(found)} matches of {pattern!r}"
    return found[0] if isinstance(found[0], tuple) else (found[0],)


def check(page: str, pattern: str, values: Iterable[float | None]) -> None:
    """Assert that a page's figures are the values, rounded to as many decimals as the page writes."""
    for text, value in zip(figures(page, pattern), values, strict=True):
        assert value is not None
        decimals = len(text.partition(".")[2])
        assert f"{value:.{decimals}f}" == text.replace(",", "").lstrip("+"), (pattern, text, value)
