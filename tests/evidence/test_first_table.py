"""The first table that a reader meets: README.md and evidence/README.md show what the records give."""

import json
from pathlib import Path

import pytest

from evidence.scripts.plan_choices import EVERY
from evidence.scripts.tables import accuracy, blind, first, plan_choices, several_gpus_suite, step_time
from evidence.scripts.tables.errors import exact
from page_claims import ROOT, check

PAGES = ("README.md", "evidence/README.md")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_shows_the_table_and_explains_it(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    assert f"<!-- table: first.table -->\n\n{first.table()}\n\n<!-- end -->" in text
    check(page, "suite\\* is # recipes for one H200", (len(accuracy.suite()[accuracy.ANEW]),))
    check(page, "less than # % of the fastest speed", (100 * first.SUFFICES,))


def test_a_row_counts_its_runs_and_writes_the_worst_with_its_sign() -> None:
    row = first.Row("x", [0.001, -0.25, 0.0], 1, 4, "all")
    assert row.cells() == ["x", "3", "0.10 %", "-25.0 %", "1 of 4", "all"]
    assert row._replace(wrong=None).cells()[4] == "–"


def test_memory_counts_every_run_that_was_predicted_before_it_was_measured() -> None:
    before, suite_first, suite_anew, *_ = first.memory()
    assert len(before.errors) == sum(
        [one.allocated_bytes is not None for some in blind.by_title().values() for one in some]
        + [len(some) for some in step_time.drawn().values()]
        + [len(step_time.h100())]
    )
    ended = accuracy.verdicts(accuracy.suite()[accuracy.ANEW])
    assert suite_anew.verdicts - len(suite_anew.errors) == ended[False, "out-of-memory"]
    assert [exact(row.errors) for row in (suite_first, suite_anew)] == [244, 334]
    assert (suite_first.wrong, suite_anew.wrong) == (4, 0)


def test_a_wrong_verdict_is_a_run_outside_what_was_predicted() -> None:
    busy, uncalibrated, calibrated = first.steps_of_one_gpu()
    outside = [not row["low_s"] <= row["step_s"] <= row["high_s"] for row in step_time.h100_rows()[True]]
    outside += [
        not row["low_s"] <= row["step_s"] <= row["high_s"]
        for name in step_time.HOSTS
        for row in step_time.on_host(name)
    ]
    assert (calibrated.wrong, calibrated.verdicts) == (sum(outside), len(outside))
    assert len(uncalibrated.errors) == len(calibrated.errors)
    assert (uncalibrated.wrong, uncalibrated.verdicts) == (2, 19)
    assert busy.blind == first.HELD_OUT


def test_every_recipe_of_two_gpus_has_bounds_and_fits_as_predicted() -> None:
    memory, steps, *_ = first.of_two_gpus()
    pairs = several_gpus_suite.suite()
    assert memory.wrong == 0
    assert steps.verdicts == memory.verdicts == len(steps.errors) > len(pairs)


def test_a_plan_is_judged_by_the_fastest_measured_recipe() -> None:
    found = first.plans()
    assert found.wrong == sum(error < first.SUFFICES - 1 for error in found.errors)
    assert max(found.errors) == 0.0


def made_at(file: Path) -> dict[str, str]:
    """Return when the first line of each recipe or script was made."""
    found: dict[str, str] = {}
    for row in map(json.loads, file.read_text("utf-8").splitlines()):
        found.setdefault(row.get("recipe_id") or row["script"], row.get("created_at") or row["made_at"])
    return found


PAIRS = [
    *((several_gpus_suite.FOLDER, name) for name in ("suite", "peaks", "scripts")),
    *((several_gpus_suite.FOLDER, name) for name in several_gpus_suite.MEASURED_LATER),
    *((plan_choices.FOLDER, goal.name) for goal in EVERY),
]


@pytest.mark.parametrize(("folder", "name"), PAIRS, ids=[name for _, name in PAIRS])
def test_what_is_called_blind_was_predicted_first(folder: Path, name: str) -> None:
    """Plans and two GPUs: ``blind.by_title`` leaves out others, and step times have a test of their own."""
    ends = (f"{name}-predicted", f"{name}-measured")
    if folder == plan_choices.FOLDER:
        ends = (f"predicted-{name}", f"measured-{name}")
    predicted, measured = (made_at(folder / f"{end}.jsonl") for end in ends)
    assert measured
    assert all(predicted[key] < at for key, at in measured.items())
