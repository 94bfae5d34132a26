"""The table of a policy that learns xiangqi, of evidence/pages/reinforcement-learning.md."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from evidence.scripts.tables.joined import RESULTS
from trainfit.report.table import markdown_grid

FOLDER = RESULTS / "xiangqi"
POLICIES = {"first": "no divergence", "second": "`kl: 0.05`, games in which one side captures"}


@cache
def evaluations() -> tuple[dict[str, Any], ...]:
    """Return what ``trainfit evaluate`` printed, each with its run, model, steps and commit."""
    lines = (FOLDER / "evaluations.jsonl").read_text("utf-8").splitlines()
    return tuple(json.loads(line) for line in lines)


@cache
def rollouts(run: str) -> tuple[dict[str, Any], ...]:
    """Return a run's log of rollouts, without the lengths of single completions."""
    lines = (FOLDER / f"{run}-rollouts.jsonl").read_text("utf-8").splitlines()
    return tuple(json.loads(line) for line in lines)


def learning() -> str:
    """Return legal moves and games of both runs, before and after GRPO."""
    rows = []
    for one in evaluations():
        if one["games"] is None:
            continue
        games, steps = one["games"], f"{one['steps']} steps"
        what = f"supervised, {steps}" if one["model"] == "supervised" else f"then GRPO, {steps}"
        rows.append((
            POLICIES[one["run"]], what, f"{one['shares']['legal']:.1%}", f"{games['won']:.0%}",
            f"{games['drawn']:.0%}", f"{games['illegal']:.1%}", f"{games['moves_median']:g}",
        ))  # fmt: skip
    heads = ("run", "model", "legal moves", "won", "drawn", "lost by an illegal move", "moves, median")
    return markdown_grid(heads, rows, 2)
