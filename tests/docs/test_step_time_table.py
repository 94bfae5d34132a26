"""The table of step times: joined by recipe, grouped, and refused where a row was changed."""

import json
import re
from pathlib import Path
from statistics import median

import pytest

from benchmarks.host_steps import recipe_ids
from benchmarks.step_time import measured, predicted
from benchmarks.tables import step_time
from page_claims import check
from tiny_recipe import tiny_recipe
from trainfit.catalog.load import FOLDER, gpu
from trainfit.prediction.estimate import predict
from trainfit.prediction.time.calibrated import calibrated, using
from trainfit.records import load
from trainfit.spec.errors import InputError
from trainfit.spec.provenance import DIGEST, digest_of
from trainfit.spec.recipe import is_held_out
from trainfit.spec.result import StepTime

SMALL = step_time.BLIND.with_name("small.jsonl")


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A file of predictions that are 60 % too long; odd ones wait for the host for half of the step."""
    file = tmp_path / "predicted.jsonl"
    lines = []
    for number, (recipe, took_s) in enumerate(measured()):
        step_s = 1.6 * took_s
        host_s = step_s / 2 if number % 2 else 0.0
        row = {
            "recipe_id": recipe.id, "step_s": step_s, "low_s": 0.95 * step_s, "high_s": 1.05 * step_s,
            "parts": StepTime(matmul_s=step_s - host_s, host_s=host_s).model_dump(),
        }  # fmt: skip
        lines.append(json.dumps(row | {DIGEST: digest_of(row)}))
    file.write_text("\n".join(lines) + "\n")
    return file


def test_the_suite_has_both_halves_of_eager_and_compiled_recipes() -> None:
    kinds = [(recipe.compile is not False, is_held_out(recipe.id)) for recipe, _ in measured()]
    assert kinds == sorted(kinds)
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {
        (False, False): 105, (False, True): 98, (True, False): 24, (True, True): 23
    }  # fmt: skip


def test_errors_bounds_and_order(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = step_time.steps(written)
    assert len(found) == 250
    assert {round(one.error, 6) for one in found} == {0.6}
    assert not any(one.is_inside for one in found)
    within = [one._replace(measured_s=0.999 * one.predicted_s * one.band.high) for one in found]
    assert all(one.is_inside for one in within)
    assert not any(one._replace(measured_s=1.01 * one.measured_s).is_inside for one in within)
    monkeypatch.setattr(step_time, "steps", lambda: found)
    lines = step_time.table().splitlines()
    assert len(lines) == 2 + 4
    assert all("| 60.0 | 60.0 | +60.0 | 0 | 0." in line for line in lines[2:])
    tau, pairs = step_time.kendall_tau()
    assert tau == 1.0
    assert pairs > 200


def test_the_pages_order_of_held_out_recipes() -> None:
    tau, pairs = step_time.kendall_tau(lambda one: one.is_held_out and not one.is_compiled)
    right = round(pairs * (1 + tau) / 2)
    check("docs/results/accuracy.md", r"in # of # held-out pairs: Kendall's tau is #", (right, pairs, tau))


def test_what_was_predicted_before_it_was_measured() -> None:
    """The rows are the recipes' whose predictions had been committed, as many as were measured."""
    folder = step_time.BLIND.parent
    predicted_s, measured_s = (
        {one.recipe_id: one for one in load(folder / f"blind-{name}.jsonl")}
        for name in ("predicted", "measured")
    )
    rows = step_time.rows(step_time.BLIND)
    assert {row["recipe_id"] for row in rows} == set(measured_s) <= set(predicted_s)
    errors = []
    for row in rows:
        before, after = predicted_s[row["recipe_id"]], measured_s[row["recipe_id"]]
        assert before.created_at < after.created_at
        assert before.estimate is not None
        assert after.measurement is not None
        assert after.measurement.peak_allocated_bytes
        assert row["predicted_s"] == pytest.approx(before.estimate.step_s, rel=1e-6)
        assert row["step_s"] == pytest.approx(after.measurement.step_s)
        errors.append(before.estimate.peak_allocated_bytes / after.measurement.peak_allocated_bytes - 1)
    check(
        "docs/results/accuracy.md",
        r"# recipes drawn by a seed were predicted with .*? # were then measured .*? "
        r"Of the same #, # allocated peaks are exact and the worst is off by # %",
        (len(predicted_s), len(rows), len(rows), errors.count(0.0), 100 * max(map(abs, errors))),
    )


def test_small_compiled_steps() -> None:
    errors = [100 * (row["calibrated_s"] / row["step_s"] - 1) for row in step_time.rows(SMALL)]
    assert len(errors) == 4
    check("docs/results/accuracy.md", "were # to # % off with it", (min(errors), max(errors)))


def test_a_changed_row_is_refused(written: Path) -> None:
    first, _, rest = written.read_text().partition("\n")
    row = json.loads(first) | {"step_s": 1.0}
    written.write_text(json.dumps(row) + "\n" + rest)
    with pytest.raises(InputError, match="SHA-256"):
        step_time.rows(written)


def test_a_row_has_the_time_that_predict_has() -> None:
    recipe = tiny_recipe()
    row, found = predicted(recipe.content()), predict(recipe)
    assert isinstance(row, dict)
    assert row["step_s"] == found.step_s
    assert (row["low_s"], row["high_s"]) == (found.bounds["step_s"].low, found.bounds["step_s"].high)
    assert row[DIGEST] == digest_of(row)


def test_steps_on_another_host() -> None:
    """Held-out steps that the host decides, on a machine whose host was calibrated."""
    folder = step_time.FILE.parent
    found = step_time.rows(folder / "other-host.jsonl")
    before = {recipe.id: took_s for recipe, took_s in measured()}
    assert all(is_held_out(row["recipe_id"]) for row in found)
    errors = {
        name: sorted(abs(row[name] / row["step_s"] - 1) for row in found)
        for name in ("predicted_s", "calibrated_s")
    }
    with using(folder / "other-host-calibration.json"):
        ratio = re.search(r"takes (.*) times as long .* by (.*) small steps", calibrated(gpu("h200")).origin)
    assert ratio is not None
    without, calibrated_errors = errors.values()
    check(
        "docs/guide/calibrate.md",
        r"takes # times as long by # small steps, # .* are # % off .* without, # % with .*\(the worst # %\)",
        (
            *map(float, ratio.groups()),
            len(found),
            100 * median(without),
            100 * median(calibrated_errors),
            100 * max(calibrated_errors),
        ),
    )
    inside = sum(row["low_s"] <= row["step_s"] <= row["high_s"] for row in found)
    check("docs/guide/calibrate.md", "# of them lie within the bounds", (inside,))
    third = step_time.blind_groups()["the host decides"]
    check(
        "docs/guide/calibrate.md", r"On a third, six are # and \[# % off\]",
        [
            100 * median(abs(row[name] / row["step_s"] - 1) for row in third)
            for name in ("predicted_s", "calibrated_s")
        ],
    )  # fmt: skip
    assert len(third) == 6
    assert [row["recipe_id"] for row in found] == recipe_ids()[: len(found)]
    shipped = json.loads((FOLDER / "calibrations" / "h200.json").read_text("utf-8"))["host_steps"]
    own = median(one["step_s"] / one["expected_s"] for one in shipped if one.get("expected_s"))
    check("docs/guide/calibrate.md", "over the expected, #\\.", (own,))
    slower = median(row["step_s"] / before[row["recipe_id"]] for row in found)
    check(
        "docs/results/accuracy.md",
        r"The first # by id .* took # times as long .* from # to # %",
        (len(found), slower, 100 * median(without), 100 * median(calibrated_errors)),
    )
