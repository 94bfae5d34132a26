"""Rows of a sweep from its records: while it runs, and read again from its folder. No torch here.

Enters: the sweep's variants and Records. Leaves: a Row a variant, in the file's order.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from trainfit.spec.errors import InputError
from trainfit.spec.result import Outcome, Record
from trainfit.spec.sweep import RUNNING, WAITING, Part, Row, SweepFile, Variant
from trainfit.sweeps.read import Sweep


def rows_of(sweep: Sweep, records: Iterable[Record]) -> tuple[Row, ...]:
    """Return a Row a variant; of several records of one recipe's part the last counts.

    Raises:
        InputError: a variant was trained for another number of steps than the file asks.
    """
    newest: dict[tuple[str, Part], Record] = {}
    for record in records:
        if record.outcome is not None and record.kind != "bench":
            newest[record.recipe_id, record.kind] = record
    return tuple(
        row_of(variant, sweep.file, _of_variant(variant, sweep.file, newest)) for variant in sweep.variants
    )


def row_of(
    variant: Variant, file: SweepFile, records: Mapping[Part, Record], *, running: Part | None = None
) -> Row:
    """The variant's Row; ``running``: the part that is running now."""
    outcomes: dict[Part, Outcome] = {
        part: outcome
        for part in file.parts()
        if part in records and (outcome := records[part].outcome) is not None
    }
    status, message = (RUNNING, running) if running else _status(variant, file, outcomes)
    found: dict[str, Any] = {
        name: getattr(records[part], name)
        for part, name in (("predict", "estimate"), ("measure", "measurement"), ("train", "train"))
        if part in outcomes
    }
    return Row(
        variant=variant.name, recipe=variant.recipe.content(), recipe_id=variant.recipe.id, status=status,
        message=message,
        outcomes={str(part): outcome for part, outcome in outcomes.items()}, **found,
    )  # fmt: skip


def refused_before_it_ran(outcome: Outcome) -> bool:
    """Return whether no step can be built of the recipe anywhere, so that no process was started."""
    return outcome.status == "refused" and not outcome.seconds


def _of_variant(
    variant: Variant, file: SweepFile, newest: Mapping[tuple[str, Part], Record]
) -> dict[Part, Record]:
    records: dict[Part, Record] = {
        part: newest[variant.recipe.id, part] for part in file.parts() if (variant.recipe.id, part) in newest
    }
    trained = records["train"].train if "train" in records else None
    if trained is not None and file.train is not None and trained["run"]["steps"] != file.train.steps:
        raise InputError(
            f"{variant.name} was trained for {trained['run']['steps']} steps, "
            f"the sweep's file has {file.train.steps}",
            "run the sweep again, or correct the file",
            field="train.steps",
        )
    return records


def _status(variant: Variant, file: SweepFile, outcomes: Mapping[Part, Outcome]) -> tuple[str, str]:
    """Return status and message.

    A recipe without a prediction may still be measured, unless that plans it.
    """
    parts = file.parts()
    planned = variant.recipe.has_open_fields
    for part in parts:
        outcome = outcomes.get(part)
        if outcome is None:
            return WAITING, part
        decides = part != "predict" or len(parts) == 1 or planned or refused_before_it_ran(outcome)
        if outcome.status != "done" and decides:
            return outcome.status, outcome.message
    predicted = outcomes.get("predict")
    if predicted is None or predicted.status == "done":
        return "done", ""
    return "done", f"prediction {predicted.status}: {predicted.message}"
