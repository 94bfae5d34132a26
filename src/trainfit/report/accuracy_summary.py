"""How good the predictions are, summed up.

Enters: Records (predict and measure, joined by recipe id). Leaves: an Accuracy, the same for the same records in any
order. Recipes stand in two halves by a hash of their id (spec/held_out.py): from one half the rules may be learned,
the other judges them. A trial that did not come to its end is counted and listed, never dropped.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from trainfit.catalog.load import model as find_model
from trainfit.report.accuracy_figures import (
    Accuracy,
    Errors,
    Group,
    Outlier,
    PhaseMiss,
    Times,
    Unfinished,
    Verdicts,
    rank,
)
from trainfit.report.compare import Comparison, compare
from trainfit.spec.errors import InputError
from trainfit.spec.held_out import is_held_out
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import PHASES, Record
from trainfit.techniques.registry import techniques

PHASE_NAMES = tuple(f"{step}.{phase}" for step in ("first", "steady") for phase in PHASES)
NUM_WORST = 10
NEAR = 0.03
"""Predicted use within this share of the card's size: where the verdict is hardest."""
NAMED = 0.005
"""Every phase with a larger error is named."""
UNKNOWN = "unknown"


def judge(records: Sequence[Record], causes: dict[str, str]) -> tuple[Accuracy, list[Comparison]]:
    """Join the records and sum up; also the comparisons that the plots show, in order of recipe id.

    Raises:
        InputError: no recipe has both a prediction and a measurement.
    """
    found = sorted(compare(records), key=lambda one: (one.recipe.id, one.device))
    both = [one for one in found if one.predicted and one.measured]
    if not both:
        raise InputError(
            "no recipe has both a prediction and a measurement", "give files with records of both kinds"
        )
    accuracy = Accuracy(
        groups=tuple(_groups(both)),
        by_technique=tuple(_by_technique(both)),
        verdicts=_verdicts(both),
        worst={name: _worst(both, f"peak_{name}_bytes", causes) for name in ("allocated", "reserved")},
        phase_misses=_phase_misses(both, causes),
        origins=_origins(records, {one.recipe.id for one in both}),
        families=dict(sorted(Counter(family(one.recipe) for one in both).items())),
        unfinished=tuple(_unfinished(one, causes) for one in found if one.status in ("crashed", "timeout")),
        not_measured=tuple(describe(one) for one in found if one.measured is None),
        not_predicted=tuple(f"{describe(one)} ({one.status})" for one in found if one.predicted is None),
        sources=_sources(records),
    )
    return accuracy, both


def _groups(both: list[Comparison]) -> Iterable[Group]:
    yield _group("all", both)
    for half, held_out in (("learned from", False), ("held out", True)):
        for way, compiled in (("eager", False), ("compiled", True)):
            mine = [
                one for one in both
                if is_held_out(one.recipe.id) == held_out and (one.recipe.compile is not False) == compiled
            ]  # fmt: skip
            if mine:
                yield _group(f"{half}, {way}", mine)


def _by_technique(both: list[Comparison]) -> Iterable[Group]:
    for name, technique in sorted(techniques().items()):
        mine = [one for one in both if technique.applies(one.recipe)]
        if mine:
            yield _group(name, mine)


def _group(name: str, mine: list[Comparison]) -> Group:
    def errors(field: str) -> Errors | None:
        return Errors.of(error for one in mine if (error := one.error(field)) is not None)

    phases = {phase: errors(f"phases.{phase}") for phase in PHASE_NAMES}
    return Group(
        name=name,
        num_recipes=len(mine),
        statuses=dict(sorted(Counter(one.status for one in mine).items())),
        allocated=errors("peak_allocated_bytes"),
        after_init=errors("phases.after_init"),
        phases={phase: found for phase, found in phases.items() if found is not None},
        reserved=errors("peak_reserved_bytes"),
        device=errors("peak_device_bytes"),
        times=_times(mine),
    )


def time_ratio(one: Comparison) -> float | None:
    """Measured over expected step time; None where either is missing or on another device than the recipe's."""
    if not (one.predicted and one.measured and one.predicted.step_s and one.measured.step_s):
        return None
    return one.measured.step_s / one.predicted.step_s if one.on_its_device else None


def _times(mine: list[Comparison]) -> Times | None:
    ratios = sorted(ratio for one in mine if (ratio := time_ratio(one)) is not None)
    if not ratios:
        return None
    return Times(
        num_recipes=len(ratios), num_inside=sum(_is_inside(one) for one in mine), lowest=ratios[0],
        percentile_5=rank(ratios, 0.05), median=rank(ratios, 0.5), percentile_95=rank(ratios, 0.95),
        highest=ratios[-1],
    )  # fmt: skip


def _is_inside(one: Comparison) -> bool:
    if time_ratio(one) is None or one.predicted is None or one.measured is None:
        return False
    bounds, step_s = one.predicted.bounds.get("step_s"), one.measured.step_s
    return bounds is not None and step_s is not None and bounds.low <= step_s <= bounds.high


def _verdicts(both: list[Comparison]) -> Verdicts:
    ends = [(one, (one.predicted.fits, one.status)) for one in both if one.predicted]
    counts = Counter(end for _, end in ends)
    wrong = {(True, "out-of-memory"), (False, "done")}
    return Verdicts(
        fits_and_ran=counts[True, "done"],
        fits_but_out_of_memory=counts[True, "out-of-memory"],
        too_large_and_out_of_memory=counts[False, "out-of-memory"],
        too_large_but_ran=counts[False, "done"],
        near_and_ran=sum(end[1] == "done" for one, end in ends if _is_near(one)),
        near_and_out_of_memory=sum(end[1] == "out-of-memory" for one, end in ends if _is_near(one)),
        wrong=tuple(describe(one) for one, end in ends if end in wrong),
    )


def _is_near(one: Comparison) -> bool:
    told = one.predicted
    return told is not None and abs(told.peak_device_bytes - told.device_bytes) <= NEAR * told.device_bytes


def _phase_misses(both: list[Comparison], causes: dict[str, str]) -> tuple[PhaseMiss, ...]:
    found = [
        PhaseMiss(one.recipe.id, describe(one), phase, error, causes.get(f"{one.recipe.id}.{phase}", UNKNOWN))
        for one in both
        for phase, error in one.phase_errors().items()
        if abs(error) > NAMED
    ]
    return tuple(sorted(found, key=lambda miss: (-abs(miss.error), miss.recipe_id, miss.phase)))


def _worst(both: list[Comparison], field: str, causes: dict[str, str]) -> tuple[Outlier, ...]:
    errors = [(error, one) for one in both if (error := one.error(field)) is not None]
    errors.sort(key=lambda pair: (-abs(pair[0]), pair[1].recipe.id))
    return tuple(
        Outlier(
            recipe_id=one.recipe.id, recipe=describe(one), error=error,
            error_bytes=getattr(one.predicted, field) - getattr(one.measured, field),
            cause=causes.get(one.recipe.id, UNKNOWN),
        )
        for error, one in errors[:NUM_WORST]
    )  # fmt: skip


def _origins(records: Sequence[Record], recipe_ids: set[str]) -> dict[str, int]:
    """The generator's recipes are tagged ``truth`` and ``near-card`` when they are measured."""
    tags: dict[str, set[str]] = {}
    for record in records:
        if record.recipe_id in recipe_ids:
            tags.setdefault(record.recipe_id, set()).update(record.tags)
    names = (
        "near the card's size, drawn" if "near-card" in found else "drawn" if "truth" in found else "chosen"
        for found in tags.values()
    )
    return dict(sorted(Counter(names).items()))


def _unfinished(one: Comparison, causes: dict[str, str]) -> Unfinished:
    message = one.measured.message if one.measured else ""
    lines = [line.strip() for line in message.splitlines() if line.strip(" ^")] or [""]
    shown = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
    return Unfinished(
        one.recipe.id, describe(one), one.status, shown[:240], causes.get(one.recipe.id, UNKNOWN)
    )


def describe(one: Comparison) -> str:
    """``gpt2, 8 x 1024, amp-bf16``: model, batch and technique."""
    return f"{one.model}, {one.batch}, {one.technique}"


def family(recipe: Recipe) -> str:
    """The catalog's family of the model, else its config's type; our own decoder apart from transformers' models."""
    config = recipe.model.config
    name = find_model(config).family if isinstance(config, str) else str(config.get("model_type", UNKNOWN))
    return f"{name} (native)" if recipe.model.implementation == "native" else name


def _sources(records: Sequence[Record]) -> tuple[str, ...]:
    counts: Counter[str] = Counter()
    for record in records:
        code = f"commit {record.commit or UNKNOWN}"
        if record.measurement is not None:
            on = record.measurement.environment
            counts[
                f"measured on {on.device}, driver {on.driver or UNKNOWN}, CUDA {on.cuda or 'none'}, torch {on.torch}, "
                f"transformers {on.transformers or UNKNOWN}, {code}"
            ] += 1
        elif record.estimate is not None:
            counts[f"predicted for {record.recipe.get('hardware', {}).get('gpu', UNKNOWN)}, {code}"] += 1
    return tuple(f"{count} {text}" for text, count in sorted(counts.items()))
