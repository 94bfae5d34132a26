"""Figures in the sentences of a page, found by a pattern."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def sentences(page: str) -> str:
    """Return the text of a page without its tables and markers, on one line."""
    lines = (ROOT / page).read_text("utf-8").splitlines()
    return " ".join(line for line in lines if not line.startswith(("|", "<!--", "!["))).replace("  ", " ")


def figures(page: str, pattern: str) -> tuple[str, ...]:
    """Return what the pattern's groups match; ``#`` stands for a number. The pattern must match once."""
    number = r"([+-]?\\d[\\d,]*(?:\\.\\d+)?)"
    found = re.findall(re.sub("#", number, pattern), sentences(page))
    assert len(found) == 1, f"{page}: {len(found)} matches of {pattern!r}"
    return found[0] if isinstance(found[0], tuple) else (found[0],)
