"""Rows of a sweep from its records: while it runs, and read again from its folder. No torch here."""

from collections.abc import Iterable, Mapping

from trainfit.spec.errors import InputError
from trainfit.spec.result import Outcome, Record
from trainfit.spec.sweep import RUNNING, WAITING, Part, Row, SweepFile, Variant
from trainfit.sweeps.read import Sweep


def rows_of(sweep: Sweep, records: Iterable[Record]) -> tuple[Row, ...]:
    """Return a Row a variant; of several records of one recipe's part the last counts.

    Raises:
        InputError: a variant was trained for another number of steps than the file's.
    """
    newest: dict[str, dict[Part, Record]] = {}
    for record in records:
        if record.outcome is not None and record.kind != "bench":
            newest.setdefault(record.recipe_id, {})[record.kind] = record
    found = [(variant, newest.get(variant.recipe.id, {})) for variant in sweep.variants]
    for variant, of_variant in found:
        trained = of_variant["train"].train if "train" in of_variant else None
        wanted = sweep.file.train.steps if sweep.file.train else None
        if trained is not None and wanted is not None and (steps := trained["run"]["steps"]) != wanted:
            problem = f"{variant.name} was trained for {steps} steps, the sweep's file has {wanted}"
            raise InputError(problem, "run the sweep again, or correct the file", field="train.steps")
    return tuple(row_of(variant, sweep.file, of_variant) for variant, of_variant in found)


def row_of(
    variant: Variant, file: SweepFile, records: Mapping[Part, Record], *, running: Part | None = None
) -> Row:
    """Return the variant's Row; ``running``: the part that is running now."""
    outcomes: dict[Part, Outcome] = {
        part: outcome
        for part in file.parts()
        if part in records and (outcome := records[part].outcome) is not None
    }
    status, message = (RUNNING, running) if running else _status(variant, file, outcomes)
    measured = records["measure"].measurement if "measure" in outcomes else None
    if status == "done" and measured is not None and measured.environment.held_back:
        message = "; ".join(one for one in (measured.message, message) if one)
    return Row(
        variant=variant.name, recipe=variant.recipe.content(), recipe_id=variant.recipe.id, status=status,
        message=message, outcomes={str(part): outcome for part, outcome in outcomes.items()},
        estimate=records["predict"].estimate if "predict" in outcomes else None,
        measurement=measured,
        train=records["train"].train if "train" in outcomes else None,
    )  # fmt: skip


def refused_before_it_ran(outcome: Outcome) -> bool:
    """Return whether no step can be made of the recipe anywhere, so that no process was started for it."""
    return outcome.status == "refused" and not outcome.seconds


def _status(variant: Variant, file: SweepFile, outcomes: Mapping[Part, Outcome]) -> tuple[str, str]:
    """Return status and message; a recipe may be measured without a prediction, unless that plans it."""
    parts = file.parts()
    for part in parts:
        outcome = outcomes.get(part)
        if outcome is None:
            return WAITING, part
        decides = part != "predict" or len(parts) == 1 or variant.recipe.has_open_fields
        if outcome.status != "done" and (decides or refused_before_it_ran(outcome)):
            return outcome.status, outcome.message
    predicted = outcomes.get("predict")
    if predicted is None or predicted.status == "done":
        return "done", ""
    return "done", f"prediction {predicted.status}: {predicted.message}"
