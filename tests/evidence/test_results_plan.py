"""The figures in the sentences of evidence/pages/plan.md are those of the records."""

from collections.abc import Sequence
from statistics import median

import pytest

from evidence.scripts.plan_choices import FREE, ONE_H100, SEVERAL, Goal
from evidence.scripts.tables import plan, plan_choices
from page_claims import check
from trainfit.records import load
from trainfit.report.compare import Comparison
from trainfit.spec.parsing.parse import parse
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Estimate, Measurement

pytest.importorskip("peft")
pytest.importorskip("torchao")


PAGE = "evidence/pages/plan.md"


def estimates(name: str) -> dict[str, Estimate]:
    """Return the predictions of a file's recipes by id."""
    rows = load(plan_choices.FOLDER / f"predicted-{name}.jsonl")
    return {one.recipe_id: one.estimate for one in rows if one.estimate is not None}


def steps_of(one: Measurement | None) -> tuple[float, ...]:
    """Return the seconds of a measurement's timed steps."""
    assert one is not None
    assert one.step_times is not None
    return one.step_times.samples


def in_turns(one: plan_choices.Choice) -> tuple[list[float], list[float]]:
    """Return tokens a second, measured again in turns, of a first choice and of the fastest beside it."""
    found: dict[str, list[float]] = {}
    for record in load(plan_choices.FOLDER / "in-turns.jsonl"):
        assert record.measurement is not None
        found.setdefault(record.recipe_id, []).append(record.measurement.tokens_per_s or 0.0)
    results = plan_choices.measured(one.goal)
    fastest = max(one.within, key=lambda each: each.tokens_per_s or 0.0)
    first, other = (
        next(id_ for id_, each in results.items() if each == which) for which in (one.first, fastest)
    )
    return found[first], found[other]


def test_the_choices_that_were_measured() -> None:
    every = plan_choices.choices()
    fitting = [one for one in every if one.fits]
    assert all(one.first is not None and one.first.status == "done" for one in fitting)
    assert all(one.first in one.within for one in fitting)
    shares = {(one.goal.model, one.cap_gib): one.share or 0.0 for one in fitting}
    good = sum(share >= 0.97 for share in shares.values())
    check(PAGE, r"# of # first choices reach 97 % of the fastest", (good, len(shares)))
    missed = [one for one in fitting if (one.share or 0.0) < 0.97]
    mistral, lora, qlora = missed
    assert [(one.goal.name, one.cap_gib) for one in missed] == [
        ("mistral-7b-v0.1-lora", 24), ("qwen3-14b-lora", 48), ("qwen3-14b-qlora", 24),
    ]  # fmt: skip
    unsteady = [max(steps_of(one.first)) / min(steps_of(one.first)) for one in (mistral, qlora)]
    check(PAGE, r"four steps had differed by # %.* \(# %\)", [100 * (ratio - 1) for ratio in unsteady])
    assert {len(steps_of(one.first)) for one in (mistral, qlora)} == {4}
    for one, sentence in (
        (mistral, "reaches # and # % of"),
        (qlora, "%\\) # and # %"),
        (lora, "48 GiB # and # %"),
    ):
        first, other = in_turns(one)
        check(PAGE, sentence, [100 * own / best for own, best in zip(first, other, strict=True)])
    goal = next(one.goal for one in fitting if one.goal.model == "qwen2.5-0.5b")
    expected, results = estimates(goal.name), plan_choices.measured(goal)
    times = [(expected[id_].tokens_per_s or 0.0) / (one.tokens_per_s or 1.0) for id_, one in results.items()]
    check(PAGE, "took up to # times", (max(times),))
    few = [(one.goal.model, one.cap_gib, len(one.within)) for one in fitting if len(one.within) < 30]
    assert [(model, cap) for model, cap, _ in few] == [("gemma-2b", 24), ("pythia-2.8b", 24)]
    numbers = [number for _, _, number in few]
    check(PAGE, "There # and # recipes .* each other limit at least #", [*numbers, 30])
    faster: dict[tuple[str, int], float] = {}
    for one in fitting:
        own = max(each.tokens_per_s or 0.0 for each in one.own if each in one.within)
        if one.best > own:
            faster[one.goal.model, one.cap_gib] = 100 * (one.best / own - 1)
    assert list(faster) == [("gemma-2b", 24), ("pythia-2.8b", 24)]
    check(PAGE, "planner's own, by at most # %", (max(faster.values()),))


def compared(goals: Sequence[Goal]) -> list[Comparison]:
    """Return the measured recipes of goals with their predictions."""
    return [
        Comparison(parse(Recipe, row.recipe), row.estimate, plan_choices.measured(goal)[row.recipe_id])
        for goal in goals
        for row in load(plan_choices.FOLDER / f"predicted-{goal.name}.jsonl")
        if row.recipe_id in plan_choices.measured(goal)
    ]


def percent(several: list[Comparison], name: str) -> list[float]:
    """Return absolute errors in percent."""
    return [100 * abs(one.error(name) or 0.0) for one in several]


def test_the_choices_for_two_gpus() -> None:
    every = plan_choices.choices(SEVERAL)
    assert all(one.first in one.within for one in every)
    shares = [100 * (one.share or 0.0) for one in every]
    assert sum(share >= 97 for share in shares) == len(every) - 1 == 5
    check(PAGE, r"24 GiB reaches # %: compiled blocks", (min(shares),))
    few = [(one.goal.model, one.cap_gib) for one in every if len(one.within) < 30]
    assert few == [("qwen3-4b", 48), ("llama-3.1-8b", 80)]
    found = compared(SEVERAL)
    sharded = [one for one in found if one.recipe.mesh.shards_weights]
    whole = [one for one in found if not one.recipe.mesh.shards_weights]
    allocated, reserved = (percent(sharded, f"peak_{kind}_bytes") for kind in ("allocated", "reserved"))
    check(PAGE, r"reserved peaks are\s+within # %. Steps are off", (max(reserved),))
    check(
        PAGE, r"FSDP2, # recipes: # allocated peaks are exact, the others within # %",
        (len(sharded), allocated.count(0), max(allocated)),
    )  # fmt: skip
    check(PAGE, r"Steps are off by\s+# % in the median", (median(percent(sharded, "step_s")),))
    longer = sorted(1 / (1 + (one.error("step_s") or 0.0)) for one in sharded)[-12:]
    check(PAGE, r"Twelve took # to # times as long", (longer[0], longer[-1]))
    assert max(percent(whole, "step_s")) < 5.1
    peaks = percent(whole, "peak_allocated_bytes")
    check(
        PAGE, r"With whole weights, # recipes, .* # allocated peaks are exact, # more within 0.02 %",
        (len(whole), peaks.count(0), sum(0 < each < 0.02 for each in peaks)),
    )  # fmt: skip
    met = [one.peak_met for one in whole]
    check(
        PAGE,
        r"two predicted peaks, # the expected and # the possible one",
        (met.count("expected"), met.count("possible")),
    )


def test_the_choices_for_an_h100() -> None:
    every = plan_choices.choices(ONE_H100)
    assert [len(one.within) for one in every] == [8, 8, 8]
    assert all(one.share == 1.0 for one in every)
    found = compared(ONE_H100)
    allocated, reserved = (percent(found, f"peak_{kind}_bytes") for kind in ("allocated", "reserved"))
    check(
        PAGE,
        r"Of # recipes # allocated peaks are exact and the worst is off by # %; "
        r"reserved peaks are within # %",
        (len(found), allocated.count(0), max(allocated), max(reserved)),
    )  # fmt: skip
    compiled = percent([one for one in found if one.recipe.compile], "step_s")
    check(
        PAGE, "The # compiled steps are off by # % in the median, at most # %",
        (len(compiled), median(compiled), max(compiled)),
    )  # fmt: skip
    eager = [1 / (1 + (one.error("step_s") or 0.0)) for one in found if not one.recipe.compile]
    assert len(eager) == 5
    check(PAGE, r"five eager ones took # to # times", (min(eager), max(eager)))


def test_the_choices_with_free_batches() -> None:
    every = plan_choices.choices(FREE)
    assert len(every) == 13
    assert all(one.first in one.within for one in every)
    check(PAGE, "Each first choice reaches at least # %", (100 * min(one.share or 0.0 for one in every),))
    found = compared(FREE)
    allocated, reserved = (
        [100 * abs(one.error(f"peak_{kind}_bytes") or 0.0) for one in found]
        for kind in ("allocated", "reserved")
    )
    exact, near = sum(error == 0 for error in allocated), sum(error <= 0.5 for error in reserved)
    check(
        PAGE, r"Of # recipes # allocated .* than # %; # reserved", (len(found), exact, max(allocated), near)
    )
    check(PAGE, r"within 0.5 %, the worst # %", (max(reserved),))
    speeds: dict[bool, list[float]] = {True: [], False: []}
    for one in found:
        speeds[one.recipe.precision == "fp8"].append(100 * (1 / (1 + (one.error("step_s") or 0.0)) - 1))
    check(
        PAGE, r"in fp8 \(# recipes\) were predicted # % too high in the median, others #",
        (len(speeds[True]), median(speeds[True]), median(speeds[False])),
    )  # fmt: skip


def test_planned_recipes_are_faster_than_the_trainer() -> None:
    runs = plan_choices.trainer_rows()
    assert {row["status"] for row in runs} == {"done", "timeout"}
    for one in plan_choices.choices():
        if one.cap_gib == max(one.goal.caps_gib) and one.goal.tune != "qlora":
            speeds = [row.get("tokens_per_s", 0.0) for row in runs if row["model"] == one.goal.model]
            assert one.first is not None
            assert (one.first.tokens_per_s or 0.0) > max(speeds) > 0


def test_the_first_choice_is_nearly_as_fast_as_the_best() -> None:
    shares = [
        share for some in plan.groups().values() for cap in plan.CAPS_GIB if (share := plan.kept(some, cap))
    ]
    assert len(shares) == 10
    check(PAGE, "at least # %; # % is the goal", [100 * min(shares), 97])
    assert min(shares) >= 0.97
    for some in plan.groups().values():
        pairs, right = plan.ordered(some)
        assert right >= 0.96 * pairs
