"""Pre-flight estimators against measured peaks: the table of evidence/pages/estimators.md."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

from evidence.scripts.tables.accuracy import ANEW, suite
from trainfit.report.compare import Comparison
from trainfit.report.table import markdown_grid

FILE = Path(__file__).parents[2] / "records" / "estimators" / "h200.jsonl"

OURS = "trainfit"
RAN, OUT = "done", "out-of-memory"


class Score(NamedTuple):
    """Errors and verdicts of one estimator over the recipes that it can express."""

    name: str
    errors: tuple[float, ...]
    """Of what it prints against the device's peak, of recipes that ran."""
    num_ran: int
    num_out: int
    wrong_fits: int
    """Ran out of memory, and was said to fit."""
    wrong_refusals: int
    """Ran, and was said not to fit."""

    @property
    def sizes(self) -> list[float]:
        return sorted(map(abs, self.errors))

    @property
    def within_10(self) -> int:
        return sum(size <= 0.1 for size in self.sizes)


@cache
def measured() -> tuple[Comparison, ...]:
    """Return the recipes that had an H200 to themselves and ran, or ran out of memory, with predictions."""
    return tuple(
        one
        for one in suite()[ANEW]
        if one.measured is not None and one.measured.peak_device_bytes is not None
        and one.status in (RAN, OUT) and one.on_its_device
    )  # fmt: skip


@cache
def answers() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the kept answers by estimator and recipe id."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for line in FILE.read_text("utf-8").splitlines():
        row = json.loads(line)
        found.setdefault(f"{row['estimator']} {row['version']}", {})[row["of"]] = row
    return found


def score(name: str, given: Mapping[str, tuple[float, bool]]) -> Score:
    """Return an estimator's score; ``given``: bytes and verdict by recipe id."""
    pairs = [one for one in measured() if one.recipe.id in given]
    ran = [one for one in pairs if one.status == RAN]
    out = [one for one in pairs if one.status == OUT]
    errors = [
        given[one.recipe.id][0] / one.measured.peak_device_bytes - 1
        for one in ran
        if one.measured is not None and one.measured.peak_device_bytes
    ]
    return Score(
        name, tuple(errors), len(ran), len(out),
        sum(given[one.recipe.id][1] for one in out), sum(not given[one.recipe.id][1] for one in ran),
    )  # fmt: skip


def ours(ids: Sequence[str]) -> Score:
    """Return trainfit's score over these recipes."""
    wanted = set(ids)
    given = {
        one.recipe.id: (one.predicted.peak_device_bytes, one.predicted.fits)
        for one in measured()
        if one.predicted is not None and one.recipe.id in wanted
    }
    return score(OURS, given)


def scores() -> list[tuple[Score, Score]]:
    """Return every estimator's score, and trainfit's over the same recipes."""
    found = []
    for name, rows in answers().items():
        given = {of: (row["num_bytes"], row["fits"]) for of, row in rows.items()}
        found.append((score(name, given), ours(list(given))))
    return found


def table() -> str:
    """Return a line an estimator, and in it trainfit's worst error over the same recipes."""
    heads = ["estimator", "recipes", "median error, %", "90th percentile, %", "lowest and highest, %",
             "within 10 %", "fits, but ran out", "does not fit, but ran", "trainfit: worst, %",
             "wrong verdicts"]  # fmt: skip
    lines = [
        [
            one.name, str(one.num_ran + one.num_out), f"{100 * median(one.sizes):.0f}",
            f"{100 * quantiles(one.sizes, n=10)[-1]:.0f}",
            f"{100 * min(one.errors):+.0f} and {100 * max(one.errors):+.0f}",
            f"{one.within_10} of {len(one.errors)}", f"{one.wrong_fits} of {one.num_out}",
            f"{one.wrong_refusals} of {one.num_ran}", f"{100 * mine.sizes[-1]:.2f}",
            str(mine.wrong_fits + mine.wrong_refusals),
        ]
        for one, mine in scores()
    ]  # fmt: skip
    return markdown_grid(heads, lines)
