"""The first table of README.md and evidence/pages/accuracy.md: what was predicted, and how far off it was."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

from evidence.scripts.accuracy.held_out import is_held_out
from evidence.scripts.plan_choices import EVERY
from evidence.scripts.tables import accuracy, blind, plan_choices, several_gpus, several_gpus_suite, step_time
from evidence.scripts.tables.errors import share, worst
from evidence.scripts.tables.joined import FIRST_FILE, SUITE, errors, records
from trainfit.report.compare import Comparison
from trainfit.report.table import NOTHING, markdown_grid

SUFFICES = 0.97
"""Of the speed of the fastest measured recipe: what the first choice of a plan should reach."""
HELD_OUT = "held out"


class Row(NamedTuple):
    """Runs of one kind of prediction."""

    title: str
    errors: Sequence[float]
    """Predicted minus measured, over measured."""
    wrong: int | None
    """Verdicts that the runs showed to be wrong; None: the records hold none."""
    verdicts: int
    blind: str

    def cells(self) -> list[str]:
        """Return the row's cells."""
        verdicts = NOTHING if self.wrong is None else f"{self.wrong} of {self.verdicts}"
        middle, most = median(map(abs, self.errors)), worst(self.errors)
        return [
            self.title,
            str(len(self.errors)),
            _share(middle),
            _share(most, signed=True),
            verdicts,
            self.blind,
        ]


def _share(value: float, *, signed: bool = False) -> str:
    """Return a share in per cent, above 1 % with one decimal."""
    if abs(value) < 0.01:
        return share(value, signed=signed)
    return f"{100 * value:+.1f} %" if signed else f"{100 * value:.1f} %"


def table() -> str:
    """Return runs, median and worst error, and wrong verdicts, by what was predicted."""
    heads = ["predicted", "runs", "median error", "worst", "wrong verdicts", "blind"]
    rows = [one.cells() for one in (*memory(), *steps_of_one_gpu(), plans(), *of_two_gpus())]
    return markdown_grid(heads, rows, is_number=[False, True, True, True, True, False])


def memory() -> list[Row]:
    """Return the rows of peaks on one GPU."""
    found = [one for some in blind.by_title().values() for one in some]
    pairs = [one for some in (*step_time.drawn().values(), step_time.h100()) for one in some]
    wrong = sum(one.predicted.fits == (one.allocated_bytes is None) for one in found) + _wrong(pairs)
    rows = []
    for kind, sizes in {
        "allocated": [one.error for one in found], "device": [one.device_error for one in found]
    }.items():  # fmt: skip
        title, field, judged = f"{kind} memory", accuracy.PEAKS[kind], kind == "allocated"
        known = [size for size in sizes if size is not None] + errors(pairs, field)
        rows.append(Row(title, known, wrong if judged else None, len(found) + len(pairs), "all"))
        for side, mine in accuracy.suite().items():
            before = f"{_predicted_before()} of {len(mine)}" if side == accuracy.FIRST else "no"
            of_suite = Row(f"{title}, suite {side}", errors(mine, field), None, len(mine), before)
            rows.append(of_suite._replace(wrong=_wrong(mine)) if judged else of_suite)
    return rows


def steps_of_one_gpu() -> list[Row]:
    """Return the rows of step times on one GPU that neither rates nor bounds were fitted to."""
    busy = [
        one for name, mine in step_time.groups().items() for one in mine
        if one.is_held_out and not one.host_decides
    ]  # fmt: skip
    h100 = step_time.h100_rows()
    hosts = [row for name in step_time.HOSTS for row in step_time.on_host(name)]
    waiting = [*hosts, *h100[True]]
    known = [row for row in waiting if "catalog_low_s" in row]
    return [
        Row(
            "step time, the GPU decides", [one.error for one in busy] + _errors(h100[False], "predicted_s"),
            sum(not one.is_inside for one in busy) + _outside(h100[False], "catalog_"),
            len(busy) + len(h100[False]), HELD_OUT,
        ),
        Row(
            "step time, the host decides, other machines: not calibrated", _errors(waiting, "predicted_s"),
            _outside(known, "catalog_"), len(known), HELD_OUT,
        ),
        Row(
            "step time, the host decides, other machines: calibrated", _errors(waiting, "calibrated_s"),
            _outside(waiting), len(waiting), HELD_OUT,
        ),
    ]  # fmt: skip


def plans() -> Row:
    """Return the row of plans: speeds of first choices against the fastest measured recipe."""
    shares = [one.share for one in plan_choices.choices(EVERY) if one.share is not None]
    slow = sum(one < SUFFICES for one in shares)
    return Row("plan: speed of its first choice", [one - 1 for one in shares], slow, len(shares), "all")


def of_two_gpus() -> list[Row]:
    """Return the rows of recipes on two GPUs."""
    pairs = [
        *several_gpus_suite.suite(),
        *itertools.chain.from_iterable(
            map(several_gpus_suite.measured_of, several_gpus_suite.MEASURED_LATER)
        ),
    ]
    found = [several_gpus_suite.allocated_error(one) for one in pairs]
    peaks = [error for error in found if error is not None]
    peaks += [row["error"] for row in several_gpus.scripts()]
    peaks += [one.allocated_error() for one in several_gpus.comparisons()]
    anew = [one for one in several_gpus_suite.anew() if is_held_out(one.recipe.id)]
    own = [row for name in step_time.TWO_GPUS for row in step_time.on_host(name, waits=None)]
    return [
        Row("two GPUs: allocated memory", peaks, _wrong(pairs), len(pairs), "all"),
        Row("two GPUs: step time", errors(pairs, "step_s"), *_beyond(pairs), "all"),
        Row("two GPUs: step time, later rates", errors(anew, "step_s"), *_beyond(anew), HELD_OUT),
        Row(
            "two GPUs: short steps, calibrated", _errors(own, "calibrated_s"), _outside(own), len(own),
            HELD_OUT,
        ),
    ]  # fmt: skip


def _wrong(pairs: Sequence[Comparison]) -> int:
    """Return how many runs fitted and were predicted not to, or the reverse."""
    counts = accuracy.verdicts(list(pairs))
    return counts[False, "done"] + counts[True, "out-of-memory"]


def _beyond(pairs: Sequence[Comparison]) -> tuple[int, int]:
    """Return how many measured steps are outside their prediction's bounds, and how many have bounds."""
    inside: list[bool] = []
    for one in pairs:
        bounds = one.predicted.bounds.get("step_s") if one.predicted else None
        took_s = one.measured.step_s if one.measured else None
        if bounds is not None and took_s is not None:
            inside.append(bounds.low <= took_s <= bounds.high)
    return inside.count(False), len(inside)


def _predicted_before() -> int:
    """Return how many of the suite's first predictions are older than each measurement of their recipe."""
    measured: dict[str, str] = {}
    for record in records(SUITE):
        if record.measurement is not None:
            measured[record.recipe_id] = min(
                measured.get(record.recipe_id, record.created_at), record.created_at
            )
    ids = {one.recipe.id for one in accuracy.suite()[accuracy.FIRST]}
    first = [one for one in records(FIRST_FILE) if one.recipe_id in ids]
    return sum(one.created_at <= measured[one.recipe_id] for one in first)


def _errors(rows: Sequence[dict[str, Any]], column: str) -> list[float]:
    return [row[column] / row["step_s"] - 1 for row in rows]


def _outside(rows: Sequence[dict[str, Any]], prefix: str = "") -> int:
    return sum(not row[f"{prefix}low_s"] <= row["step_s"] <= row[f"{prefix}high_s"] for row in rows)
