"""The goals of our attention kernels, as a run of ``flash`` answers them.

Enters: rows. Leaves: a table of their numbers, cuDNN's beside ours, or nothing where the run had none of the shapes.
All are bf16, causal, 16 heads, batch 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trainfit.report.bench_table import Grid
from trainfit.spec.bench import BenchRow

BODIES = ("cudnn", "plain", "ours")
TITLES = ("goal", "asked", "cudnn", "plain", "ours")


@dataclass(frozen=True)
class Goal:
    """One pass of one shape; ``rate``: TFLOP/s, else milliseconds."""

    head: int
    seq: int
    which: str
    asked: str
    rate: bool

    def is_of(self, row: BenchRow) -> bool:
        shape = {"dtype": "bf16", "batch": 1, "heads": 16, "causal": True, "head": self.head, "seq": self.seq}
        return all(row.point.get(key) == cell for key, cell in (shape | {"pass": self.which}).items())

    @property
    def name(self) -> str:
        which = "forward + backward" if self.which == "both" else self.which
        return f"{which}, head {self.head}, {self.seq:,} tokens, {'TFLOP/s' if self.rate else 'ms'}"


GOALS = (
    Goal(128, 8192, "forward", "500 plain, 640 ours", rate=True),
    Goal(128, 8192, "backward", "400 plain, 500 ours", rate=True),
    Goal(128, 16384, "forward", "ahead of cuDNN", rate=True),
    Goal(128, 16384, "backward", "ahead of cuDNN", rate=True),
    Goal(64, 16384, "both", "at most 4.4", rate=False),
)


def goals(rows: Sequence[BenchRow]) -> Grid | None:
    """The goals that these rows answer, one line each; None: they answer none."""
    lines = [line for goal in GOALS if (line := _line(goal, rows)) is not None]
    if not lines:
        return None
    return Grid(TITLES, tuple(lines), (False, False, True, True, True), "")


def _line(goal: Goal, rows: Sequence[BenchRow]) -> tuple[str, ...] | None:
    found = {str(row.point["body"]): row for row in rows if goal.is_of(row)}
    if not set(found) & set(BODIES):
        return None
    cells = [_cell(goal, found[name]) if name in found else "" for name in BODIES]
    return (goal.name, goal.asked, *cells)


def _cell(goal: Goal, row: BenchRow) -> str:
    if row.status not in ("done", "unsteady") or row.times is None:
        return row.status
    mark = "" if row.status == "done" else " (unsteady)"
    shown = f"{row.numbers['tflops_per_s']:.0f}" if goal.rate else f"{1e3 * row.times.median:.2f}"
    return shown + mark
