"""The table of step times: joined by recipe, grouped, and refused where a row was changed."""

import itertools
import json
import math
import re
from pathlib import Path
from statistics import median

import pytest

from evidence.scripts.accuracy.held_out import is_held_out
from evidence.scripts.step_time import measured, predicted
from evidence.scripts.tables import several_gpus_suite, step_time
from page_claims import check
from tiny_recipe import tiny_recipe
from trainfit.calibration.host import quick_steps
from trainfit.catalog.load import FOLDER, gpu
from trainfit.prediction.predict import predict
from trainfit.prediction.time.calibrated import calibrated, own_calibration
from trainfit.records import load
from trainfit.spec.calibration import Calibration, OpTime
from trainfit.spec.errors import InputError
from trainfit.spec.provenance import DIGEST, digest_of
from trainfit.spec.result import StepTime
from trainfit.spec.value import canonical_json


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
    tau, pairs = step_time.kendall_tau()
    right = round(pairs * (1 + tau) / 2)
    check("evidence/pages/accuracy.md", r"in # of # held-out pairs: Kendall's tau is #", (right, pairs, tau))


def test_what_was_predicted_before_it_was_measured() -> None:
    """Predictions of the drawn recipes had been committed when they were measured."""
    folder = step_time.FILE.parent
    predicted_s = {one.recipe_id: one.created_at for one in load(folder / "blind-predicted.jsonl")}
    measured_s = [one for name in ("blind", "blind-again") for one in load(folder / f"{name}-measured.jsonl")]
    assert all(predicted_s[one.recipe_id] < one.created_at for one in measured_s)
    found = [one for mine in step_time.drawn().values() for one in mine]
    assert sorted(one.recipe.id for one in found) == sorted(predicted_s)
    errors = [one.error("peak_allocated_bytes") for one in found]
    sizes = [abs(error) for error in errors if error is not None]
    check(
        "evidence/pages/accuracy.md",
        r"# recipes drawn by a seed were predicted with .*? "
        r"Of the same #, # allocated peaks are exact and the worst is off by # %",
        (len(found), len(sizes), sizes.count(0.0), 100 * max(sizes)),
    )


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


def test_steps_of_an_h100() -> None:
    """58 by an H200's operations, 36 again by an H100's: each committed before it was measured."""
    folder = step_time.FILE.parent
    blind = [load(folder / f"{name}-predicted.jsonl") for name in ("h100", "h100-calibrated")]
    machines = [load(folder / f"{name}-measured.jsonl") for name in step_time.H100]
    for rows, predictions in ((machines[0], blind[0]), (machines[1] + machines[2], blind[1])):
        made = {one.recipe_id: one.created_at for one in predictions}
        assert all(made[one.recipe_id] < one.created_at for one in rows)
    found = step_time.h100()
    check(
        "evidence/pages/accuracy.md",
        r"# held-out recipes were predicted for one H100 .*, and committed\. # were measured then; one, .*\. "
        r"# of the others .* In all # were measured",
        (len(blind[0]), len(machines[0]), len(blind[1]), len(found)),
    )  # fmt: skip
    errors = [
        [abs(one.error(f"peak_{kind}_bytes") or 0.0) for one in found]
        for kind in ("allocated", "reserved", "device")
    ]
    check(
        "evidence/pages/accuracy.md",
        r"Of # allocated peaks # are exact and the worst is off by # %; "
        r"of the reserved ones # and # %; of the device's # and # %",
        (len(found), *(value for some in errors for value in (some.count(0.0), 100 * max(some)))),
    )
    every = step_time.rows(folder / "h100.jsonl")
    assert sorted(row["recipe_id"] for row in every) == sorted(one.recipe.id for one in found)
    bounds = gpu("h100-sxm").step_time_range
    assert bounds is not None
    assert all(bounds.low <= row["step_s"] / row["predicted_s"] <= bounds.high for row in every)


def test_an_h100s_operations_against_an_h200s() -> None:
    page = "evidence/pages/accuracy.md"
    ops = {}
    for name in ("h200", "h100-sxm"):
        text = (FOLDER / "calibrations" / f"{name}.json").read_text("utf-8")
        ops[name] = Calibration.model_validate_json(text).ops
    num_compiled = [sum(one.op.startswith("triton_") for one in some) for some in ops.values()]
    check(page, r"# of the H100's operations are compiled kernels \(# of the H200's\)", num_compiled[::-1])
    check("docs/internals/step-time.md", "An H100 SXM has # operations of its own", (len(ops["h100-sxm"]),))
    seconds: dict[OpTime, list[float]] = {}
    for one in ops["h200"]:
        seconds.setdefault(one._replace(seconds=0.0), []).append(one.seconds)
    found: dict[str, list[float]] = {}
    for one in ops["h100-sxm"]:
        if same := seconds.get(one._replace(seconds=0.0)):
            kind = "product" if one.shape else "attention" if one.kernel else "memory"
            kind = "compiled" if one.op.startswith("triton_") else kind
            if kind != "memory" or one.num_bytes > 64 * 2**20:
                found.setdefault(kind, []).append(one.seconds / median(same))
    assert abs(median(found["product"]) - 1) < 0.01
    memory, compiled, attention = (found[kind] for kind in ("memory", "compiled", "attention"))
    check(
        page, "timed on both cards, # memory-bound ones .* take # times .* the # compiled kernels # times, "
        "attention # times",
        (len(memory), median(memory), len(compiled), median(compiled), median(attention)),
    )  # fmt: skip


def test_nine_small_steps_stand_for_all_sixteen() -> None:
    quick = {canonical_json(data) for data in quick_steps()}
    shipped = Calibration.model_validate_json((FOLDER / "calibrations" / "h200.json").read_text("utf-8"))
    expected = {canonical_json(one.recipe): one.expected_s for one in shipped.host_steps if one.expected_s}
    files = [
        *(FOLDER / "calibrations").glob("*.json"),
        *step_time.FILE.parents[1].rglob("*-calibration*.json"),
    ]
    errors: list[float] = []
    for file in files:
        steps = Calibration.model_validate_json(file.read_text("utf-8")).host_steps
        ratios = {
            text: one.step_s / expected[text]
            for one in steps
            if (text := canonical_json(one.recipe)) in expected
        }
        if len(ratios) == 16:
            nine = median(ratio for text, ratio in ratios.items() if text in quick)
            errors.append(100 * (nine / median(ratios.values()) - 1))
    near = sorted(errors, key=abs)[:-2]
    most = math.ceil(10 * max(map(abs, near))) / 10
    check("docs/log.md", "within # % of that of all 16 in nine of eleven", (most,))
    assert len(errors) == 11
    assert [round(one) for one in sorted(errors)[:2]] == [-11, -6]


def test_hosts_of_h100s_before_and_after_their_steps() -> None:
    ratios: dict[str, list[float]] = {"before": [], "after": []}
    for name, (when, found) in itertools.product(("h100", "h100-again", "h100-third"), ratios.items()):
        own = own_calibration(step_time.FILE.parent / f"{name}-host-{when}.json")
        origin = calibrated(gpu("h100-sxm"), own).origin
        found.append(float(re.findall(r"takes ([\d.]+) times", origin)[0]))
    check(
        "evidence/pages/accuracy.md",
        "These hosts took # to # times as long .* before the steps, and # to # times after",
        [limit(some) for some in ratios.values() for limit in (min, max)],
    )  # fmt: skip


def test_steps_on_other_hosts() -> None:
    """Held-out steps that the host decides, on machines whose host was calibrated."""
    found = {name: step_time.on_host(name) for name in step_time.HOSTS}
    every = [row for mine in found.values() for row in mine]
    errors = {
        name: [row[name] / row["step_s"] - 1 for row in every] for name in ("predicted_s", "calibrated_s")
    }
    middle = [100 * median(map(abs, some)) for some in errors.values()]
    check(
        "docs/guide/calibrate.md",
        r"\[# held-out steps\].* median error is # % without and # % with .*; # lie within",
        (len(every), *middle, sum(row["low_s"] <= row["step_s"] <= row["high_s"] for row in every)),
    )
    own = errors["calibrated_s"]
    check(
        "evidence/pages/accuracy.md",
        r"in autocast \(# % too long\) and OLMoE .* \(# % too short\)",
        (100 * max(own), -100 * min(own)),
    )
    shipped = json.loads((FOLDER / "calibrations" / "h200.json").read_text("utf-8"))["host_steps"]
    slower = median(one["step_s"] / one["expected_s"] for one in shipped if one.get("expected_s"))
    check("docs/guide/calibrate.md", "catalog's machine, times #\\.", (slower,))
    folder = step_time.FILE.parent
    files = ("other-host", "blind-host", "host1", "host2", "blind-again")
    ends = {"host1": "-calibration-before", "host2": "-calibration-before"}
    ratios = []
    for name in files:
        own = own_calibration(folder / f"{name}{ends.get(name, '-calibration')}.json")
        ratio = re.search(r"takes (.*) times as long", calibrated(gpu("h200"), own).origin)
        assert ratio is not None
        ratios.append(float(ratio[1]))
    assert sum(1.25 < ratio < 1.75 for ratio in ratios) == 4
    check("evidence/pages/accuracy.md", "four take # to # times", sorted(ratios)[1::3])


def test_steps_of_tensor_parallel_on_a_slow_host() -> None:
    tensor = {
        one.recipe.id for one in several_gpus_suite.anew() if several_gpus_suite.strategy_of(one) == "tensor"
    }
    found = [row for row in step_time.rows(several_gpus_suite.FOLDER / "own-host-3.jsonl")]
    errors = [-100 * (row["calibrated_s"] / row["step_s"] - 1) for row in found if row["recipe_id"] in tensor]
    assert len(errors) == 3
    check("evidence/pages/accuracy.md", "of tensor parallel are # to # % short", (min(errors), max(errors)))


def test_small_compiled_steps() -> None:
    folder = step_time.FILE.parent
    small = [row for name in ("small", "small-again") for row in step_time.rows(folder / f"{name}.jsonl")]
    errors = [100 * (row["calibrated_s"] / row["step_s"] - 1) for row in small]
    assert len(errors) == 8
    check("evidence/pages/accuracy.md", "the host decides are # to # % off with", (min(errors), max(errors)))


def test_hosts_that_change_and_the_optimizer_in_the_backward() -> None:
    page, folder = "evidence/pages/accuracy.md", step_time.FILE.parent

    def ratio(file: Path) -> float:
        own = own_calibration(file)
        found = re.search(r"takes (.*) times as long", calibrated(gpu("h200"), own).origin)
        assert found is not None
        return float(found[1])

    changed = [ratio(folder / f"host1-calibration-{when}.json") for when in ("before", "after")]
    check(page, "became faster meanwhile: # times the catalog's before, # after", changed)
    seventh = ratio(several_gpus_suite.FOLDER / "own-host-3-calibration.json")
    check(page, "the seventh machine, whose host takes # times as long", (seventh,))
    before = {recipe.id: took_s for recipe, took_s in measured()}
    rows = [row for name in ("host1", "host2") for row in step_time.rows(folder / f"{name}.jsonl")]
    longer = [
        row["step_s"] / before[row["recipe_id"]]
        for row in rows
        if row["recipe_id"][:8] in ("94716890", "8c67f86e", "3ab995ed")
    ]
    assert len(longer) == 3
    check(page, "Gemma-3-4B took # to # times as long", (min(longer), max(longer)))
