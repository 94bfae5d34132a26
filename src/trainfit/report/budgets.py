"""Memory budgets against the time of a step, as a table and as verdicts. Enters: a SweepResult. Leaves: Markdown, Verdicts.

Rows whose recipe says ``recompute: {budget_gib: x}`` are of our solver, those with ``{budget: share}`` of the compiler's.
"""

from collections.abc import Sequence

from trainfit.report.beat_it import MET, NOT_MET, Verdict
from trainfit.report.peak_memory_tables import changes, host_gib, measured_gib, predicted_gib
from trainfit.report.sweep_results import NOT_YET, Compared, SweepResult, is_waiting, not_there
from trainfit.report.table import NOTHING, markdown_grid, percent
from trainfit.spec.sweep import Row
from trainfit.spec.units import GIB

SLOWER = 0.04
"""Largest slowdown against no recomputation."""


def budget_gib(row: Row) -> float | None:
    """What our solver may use, of a row that has such a budget."""
    recompute = row.recipe["recompute"]
    return recompute.get("budget_gib") if isinstance(recompute, dict) else None


def measured_step_s(row: Row) -> float | None:
    """The median of the measured steps."""
    done = row.measurement is not None and row.measurement.status == "done"
    return row.measurement.step_s if done and row.measurement is not None else None


def predicted_step_s(row: Row) -> float | None:
    """The expected time of a step."""
    return row.estimate.step_s if row.estimate else None


def budget_table(result: SweepResult, control: str) -> str:
    """Every row's memory and time, against ``control``, which recomputes nothing."""
    base = result.row(control)
    heads = ["row", "what it changes", "predicted GiB", "measured GiB", "error", "less, predicted", "less, measured",
             "on the host, GiB", "predicted step, ms", "slower", "measured step, ms", "slower", "within the budget"]  # fmt: skip
    lines = [_budget_cells(row, base) for row in result.rows]
    return markdown_grid(heads, lines, num_text=2)


def _budget_cells(row: Row, base: Row) -> list[str]:
    against = Compared(row, base)
    measured_s, predicted_s = measured_step_s(row), predicted_step_s(row)
    return [
        f"`{row.variant}`", changes(row.recipe, base.recipe), predicted_gib(row), measured_gib(row), percent(row.error),
        _share(against.predicted_reduction), _share(against.reduction), host_gib(row), _ms(predicted_s),
        percent(_slower(predicted_s, predicted_step_s(base))),
        not_there(row) if measured_s is None else _ms(measured_s),
        percent(_slower(measured_s, measured_step_s(base))), _within(row),
    ]  # fmt: skip


def never_over(rows: Sequence[Row]) -> Verdict:
    """Whether our solver's plans stay within their budgets when measured."""
    goal = "our solver is never over its budget when measured"
    asked = [row for row in rows if budget_gib(row) is not None]
    measured = [row for row in asked if row.measured_bytes is not None]
    over = [row for row in measured if _is_over(row)] + [row for row in asked if _broke(row)]
    if over:
        return Verdict(goal, NOT_MET, f"Over it: {', '.join(f'`{row.variant}`' for row in over)}.")
    if len(measured) < len(asked) or not asked:
        return Verdict(
            goal,
            NOT_YET,
            f"Measured: {len(measured)} of {len(asked)} budgets{', none of them over' if measured else ''}.",
        )
    return Verdict(goal, MET, f"{len(measured)} budgets, none of them over.")


def full_at_no_cost(result: SweepResult, none: str, full: str) -> Verdict:
    """Whether a budget gives full checkpointing's memory at almost no slowdown."""
    goal = f"the memory of full checkpointing at no more than {SLOWER * 100:.0f} % slowdown, by our solver"
    base, whole = result.row(none), result.row(full)
    asked = [row for row in result.rows if budget_gib(row) is not None]
    small = [row for row in asked if _as_small(row, whole, measured=True)]
    meeting = [row for row in small if _as_fast(row, base, measured=True)]
    if meeting:
        return Verdict(goal, MET, _words(meeting, base, whole, measured=True))
    if any(map(is_waiting, (*asked, base, whole))):
        foreseen = [
            row
            for row in asked
            if _as_small(row, whole, measured=False) and _as_fast(row, base, measured=False)
        ]
        return Verdict(goal, NOT_YET, "As predicted: " + _words(foreseen, base, whole, measured=False))
    return Verdict(goal, NOT_MET, _words(small, base, whole, measured=True))


def _words(rows: Sequence[Row], base: Row, whole: Row, *, measured: bool) -> str:
    reductions = [_reduction(row, base, measured=measured) for row in (*rows, whole)]
    step_s = measured_step_s if measured else predicted_step_s
    parts = [
        f"`{row.variant}` needs {_share(less)} less{_beside(row)} and is {percent(_slower(step_s(row), step_s(base)))} slower"
        for row, less in zip((*rows, whole), reductions, strict=True)
    ]
    if not rows:
        return f"no budget reaches it; {parts[-1]}."
    return f"{'; '.join(parts[:-1])}; {parts[-1]}."


def _beside(row: Row) -> str:
    host = host_gib(row)
    return "" if host == NOTHING else f" (and {host} GiB of the host's memory)"


def _reduction(row: Row, base: Row, *, measured: bool) -> float | None:
    against = Compared(row, base)
    return against.reduction if measured else against.predicted_reduction


def _as_small(row: Row, whole: Row, *, measured: bool) -> bool:
    sizes = [one.measured_bytes if measured else one.predicted_bytes for one in (row, whole)]
    return sizes[0] is not None and sizes[1] is not None and sizes[0] <= sizes[1]


def _as_fast(row: Row, base: Row, *, measured: bool) -> bool:
    step_s = measured_step_s if measured else predicted_step_s
    slower = _slower(step_s(row), step_s(base))
    return slower is not None and slower <= SLOWER


def _is_over(row: Row) -> bool:
    budget, measured = budget_gib(row), row.measured_bytes
    return budget is not None and measured is not None and measured > budget * GIB


def _broke(row: Row) -> bool:
    """Out of memory is over any budget."""
    return row.status == "out-of-memory"


def _within(row: Row) -> str:
    if budget_gib(row) is None or row.measured_bytes is None:
        return NOTHING
    return "no" if _is_over(row) else "yes"


def _slower(value: float | None, base: float | None) -> float | None:
    return value / base - 1 if value is not None and base else None


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{value * 100:.1f} %"


def _ms(value: float | None) -> str:
    return NOTHING if value is None else f"{value * 1e3:,.1f}"
