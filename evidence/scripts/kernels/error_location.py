"""Where a kernel's result is wrong, in words: for the error text of attention_candidates.py."""

from __future__ import annotations

from torch import Tensor

ROWS = 64
"""Of a tile: the finest that the kernels divide rows and columns into."""
MOST = 12
"""Heads that are listed."""


def where_wrong(name: str, found: Tensor, wanted: Tensor, allowed: float) -> str:
    """One line on two [b, heads, rows, d] tensors: tiles of 64 rows with an error over ``allowed`` by head,
    halves of columns, the worst entry, and the share of what was wanted that is there (1: right, 0: missing,
    2: twice). Empty if all is right.
    """
    found, wanted = found.double(), wanted.double()
    wrong = ~((found - wanted).abs() <= allowed)  # what is no number is wrong, too
    if not wrong.any():
        return ""
    error = (found - wanted).abs().nan_to_num(float("inf"), float("inf"))
    worst = tuple(int(x) for x in (error == error.max()).nonzero()[0])
    heads = [(b, h) for b in range(wrong.shape[0]) for h in range(wrong.shape[1]) if wrong[b, h].any()]
    listed = "; ".join(_tiles(b, h, found, wanted, wrong) for b, h in heads[:MOST])
    halves = [int(half.sum()) for half in wrong.split(ROWS, -1)]
    return (
        f"{name}: {int(wrong.sum())} of {wrong.numel()} entries off by over {allowed:.2g}, "
        f"{int(found.isnan().sum())} not numbers; "
        f"by {ROWS} columns {halves}; worst at {worst}: {found[worst]:.4g} for {wanted[worst]:.4g}; "
        f"{len(heads)} heads, as batch,head tile(share): {listed}"
    )


def _tiles(batch: int, head: int, found: Tensor, wanted: Tensor, wrong: Tensor) -> str:
    """One head's wrong tiles, each with the least-squares factor between found and wanted there."""
    parts = zip(*(x[batch, head].split(ROWS) for x in (found, wanted, wrong)), strict=True)
    shares = [
        f"{tile}({(f * w).sum() / (w * w).sum():.2f})" for tile, (f, w, bad) in enumerate(parts) if bad.any()
    ]
    return f"{batch},{head} {' '.join(shares)}"
