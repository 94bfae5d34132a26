"""The peak-memory experiment's goals, judged from a sweep's rows. Enters: a SweepResult. Leaves: Verdicts and their Markdown.

A goal is met or not by what was measured; until all that it needs is measured the verdict says so, and what is predicted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trainfit.report.sweep_results import NOT_YET, Compared, SweepResult, is_waiting, not_there
from trainfit.report.table import NOTHING, percent
from trainfit.spec.sweep import Row
from trainfit.spec.units import GIB

LESS_MEMORY = 0.85
FASTER = 2.3
"""Times the control's samples a second, over all steps (as the published figures are) and from step 10 on."""
SAME_PERPLEXITY = 0.01
"""Largest share by which a perplexity may differ from the control's, up or down."""
LEAST_MEMORY = 0.90
ERROR, ERROR_COMPILED = 0.01, 0.03
"""Largest error of a predicted peak, a share of the measured one."""
FEWEST_STEPS = 50
"""Of training below which perplexities are of models that have hardly begun to learn."""
MET, NOT_MET, NO_CONTROL = "met", "not met", "not to be judged"


@dataclass(frozen=True)
class Verdict:
    """A goal, whether it is met, and by what."""

    goal: str
    state: str
    why: str

    def line(self) -> str:
        """A Markdown list's entry."""
        return f"- **{self.state}**: {self.goal}. {self.why}".rstrip()


def verdicts(result: SweepResult, control: str) -> list[Verdict]:
    """The three goals, in the issue's order."""
    base = result.row(control)
    if base.measured_bytes is None and not is_waiting(base):
        return [_without_control(result, base), peaks_verdict(result.rows)]
    compared = [Compared(row, base) for row in result.rows if row is not base]
    steps = result.trained_steps
    if steps is not None and steps < FEWEST_STEPS:
        return [_without_perplexity(compared, steps), peaks_verdict(result.rows)]
    return [_small_and_fast(compared), _least(compared), peaks_verdict(result.rows)]


def _without_control(result: SweepResult, base: Row) -> Verdict:
    """What can be said where the control itself did not come to its end."""
    least = min(
        (row for row in result.rows if row.measured_bytes is not None),
        key=lambda row: row.measured_bytes or 0,
        default=None,
    )
    why = f"The control: {not_there(base)}, so there is nothing to measure the others by."
    if least is not None:
        why += f" The least measured is `{least.variant}` with {(least.measured_bytes or 0) / GIB:.2f} GiB"
        why += (
            f"; the control is predicted to need {base.predicted_bytes / GIB:.2f}."
            if base.predicted_bytes
            else "."
        )
    return Verdict("less memory and more speed than the control", NO_CONTROL, why)


def _without_perplexity(compared: Sequence[Compared], steps: int) -> Verdict:
    """Memory and speed alone, where training was too short to tell more."""
    goal = f"at least {LESS_MEMORY:.0%} less memory than the control at {FASTER} times its speed, and its perplexity".replace(
        "%", " %"
    )
    measured = [one for one in compared if one.reduction is not None and one.late_speed is not None]
    why = f"Trained for {steps} steps only, after which perplexities tell nothing."
    best = max(measured, key=lambda one: one.reduction or 0, default=None)
    if best is not None:
        why += f" The least memory measured so far: `{best.row.variant}`, {_share(best.reduction)} less, {_times(best.late_speed)} the speed."
    foreseen = [
        one
        for one in compared
        if is_waiting(one.row)
        and (one.predicted_reduction or 0) >= LESS_MEMORY
        and (one.predicted_speed or 0) >= FASTER
    ]
    if foreseen:
        why += " " + _foreseen(foreseen, "Memory and speed are predicted to be there")
    return Verdict(goal, NO_CONTROL, why)


def _small_and_fast(compared: Sequence[Compared]) -> Verdict:
    goal = (
        f"at least {LESS_MEMORY:.0%} less memory than the control, at least {FASTER} times its speed and a perplexity within "
        f"{SAME_PERPLEXITY:.0%} of its".replace("%", " %")
    )
    meeting = [one for one in compared if _meets(one)]
    if meeting:
        return Verdict(goal, MET, "; ".join(_measured_words(one) for one in meeting) + ".")
    foreseen = [
        one
        for one in compared
        if (one.predicted_reduction or 0) >= LESS_MEMORY and (one.predicted_speed or 0) >= FASTER
    ]
    if _waits(compared):
        return Verdict(goal, NOT_YET, _foreseen(foreseen, "Memory and speed are predicted to be there"))
    smallest = [one for one in compared if (one.reduction or 0) >= LESS_MEMORY]
    nearest = max(smallest, key=lambda one: one.late_speed or 0, default=None)
    why = f"Nearest: {_measured_words(nearest)}." if nearest else "No row needs so little memory."
    return Verdict(goal, NOT_MET, why)


def _meets(one: Compared) -> bool:
    return (
        (one.reduction or 0) >= LESS_MEMORY
        and (one.overall_speed or 0) >= FASTER
        and (one.late_speed or 0) >= FASTER
        and _same_perplexity(one)
    )


def _least(compared: Sequence[Compared]) -> Verdict:
    goal = (
        f"at least {LEAST_MEMORY:.0%} less memory at any speed, the perplexity within {SAME_PERPLEXITY:.0%} of the control's"
    ).replace("%", " %")
    known = [one for one in compared if one.reduction is not None and _same_perplexity(one)]
    best = max(known, key=lambda one: one.reduction or 0, default=None)
    if best is not None and (best.reduction or 0) >= LEAST_MEMORY:
        return Verdict(goal, MET, f"The least: {_measured_words(best)}.")
    foreseen = [one for one in compared if (one.predicted_reduction or 0) >= LEAST_MEMORY]
    if _waits(compared):
        return Verdict(goal, NOT_YET, _foreseen(foreseen, "The memory is predicted to be there"))
    why = f"The least: {_measured_words(best)}." if best else "No row keeps the perplexity."
    return Verdict(goal, NOT_MET, why)


def peaks_verdict(rows: Sequence[Row]) -> Verdict:
    """Whether every predicted peak is near the measured one."""
    goal = f"every predicted peak within {ERROR:.0%} of the measured one, {ERROR_COMPILED:.0%} where compiled".replace(
        "%", " %"
    )
    errors = {row.variant: error for row in rows if (error := row.error) is not None}
    bounds = {row.variant: ERROR_COMPILED if row.recipe["compile"] else ERROR for row in rows}
    outside = [name for name, error in errors.items() if abs(error) > bounds[name]]
    worst = max(errors, key=lambda name: abs(errors[name]), default=None)
    told = "" if worst is None else f"Within: {len(errors) - len(outside)} of {len(errors)} rows; the worst `{worst}` ({percent(errors[worst])})."  # fmt: skip
    missing = [row.variant for row in rows if row.status == "done" and row.error is None]
    if missing:
        told += f" Measured without a prediction: {', '.join(f'`{name}`' for name in missing)}."
    if outside or missing:
        return Verdict(goal, NOT_MET, (told + (f" Outside: {', '.join(f'`{name}`' for name in outside)}." if outside else "")).strip())  # fmt: skip
    if worst is None or any(map(is_waiting, rows)):
        return Verdict(goal, NOT_YET, told)
    return Verdict(goal, MET, told)


def _same_perplexity(one: Compared) -> bool:
    change = one.perplexity_change
    return change is not None and abs(change) <= SAME_PERPLEXITY


def _waits(compared: Sequence[Compared]) -> bool:
    return any(is_waiting(one.row) for one in compared) or any(
        is_waiting(one.control) for one in compared[:1]
    )


def _foreseen(found: Sequence[Compared], what: str) -> str:
    if not found:
        return "No row is predicted to be there."
    words = (
        f"`{one.row.variant}` ({_share(one.predicted_reduction)} less, {_times(one.predicted_speed)})"
        for one in found
    )
    return f"{what}: {', '.join(words)}."


def _measured_words(one: Compared) -> str:
    perplexity = percent(one.perplexity_change)
    return (
        f"`{one.row.variant}`, {_share(one.reduction)} less, {_times(one.overall_speed)} the speed over all steps and "
        f"{_times(one.late_speed)} from step 10, perplexity {perplexity}"
    )


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{value * 100:.1f} %"


def _times(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f} times"
