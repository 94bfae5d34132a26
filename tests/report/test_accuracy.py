"""The accuracy page: what is counted, what is told of trials without a result, and that it can be made again."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from test_report import measured, predicted, recipe

from trainfit.report.accuracy import main, read_causes
from trainfit.report.accuracy_figures import Errors, rank
from trainfit.report.accuracy_page import page, share
from trainfit.report.accuracy_summary import judge
from trainfit.spec.errors import InputError
from trainfit.spec.held_out import is_held_out
from trainfit.spec.result import Interval, Record
from trainfit.spec.units import GIB

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINFIT_COMMIT", "abc")  # no git process for each record


def with_bounds(record: Record, low: float, high: float) -> Record:
    assert record.estimate is not None
    bounds = {"step_s": Interval(low=low, high=high, basis="test")}
    return record.model_copy(update={"estimate": record.estimate.model_copy(update={"bounds": bounds})})


def with_error(record: Record, status: str, message: str) -> Record:
    assert record.measurement is not None
    update = {"status": status, "message": message, "peak_allocated_bytes": None, "step_s": None}
    return record.model_copy(update={"measurement": record.measurement.model_copy(update=update)})


def suite() -> list[Record]:
    """Five recipes on an H200: exact, 10 % high, compiled and 1 % low, a crash, out of memory though predicted to fit."""
    h200 = {"hardware": {"gpu": "h200"}}
    exact, high, low, crash, out = (
        recipe("exact", **h200),
        recipe("high", batch={"micro": 2}, **h200),
        recipe("low", compile="block", **h200),
        recipe("crash", **h200),
        recipe("out", **h200),
    )
    records = [with_bounds(predicted(exact, 10.0), 0.5, 1.5), measured(exact, 10.0)]
    records += [with_bounds(predicted(high, 11.0), 0.5, 0.9), measured(high, 10.0)]
    records += [predicted(low, 9.9), measured(low, 10.0)]
    records += [
        predicted(crash, 5.0),
        with_error(measured(crash, 5.0), "crashed", "ended in step 1\n  ^^^\nlast line"),
    ]
    records += [predicted(out, 50.0), with_error(measured(out, 50.0), "out-of-memory", "out of memory")]
    return records


def test_errors_are_those_counted_by_hand() -> None:
    errors = Errors.of([0.0, 0.01, -0.02, 0.03, -0.5])
    assert errors is not None
    assert (errors.num_recipes, errors.num_exact) == (5, 1)
    assert (errors.median, errors.percentile_95, errors.worst) == (0.02, 0.5, -0.5)
    assert Errors.of([]) is None
    # Nearest rank (NIST handbook): the 95th percentile of 1..20 is the 19th, of 1..21 the 20th.
    assert rank(range(1, 21), 0.95) == 19
    assert rank(range(1, 22), 0.95) == 20


def test_every_recipe_is_counted_once_in_its_half() -> None:
    accuracy, shown = judge(suite(), {})
    whole, *parts = accuracy.groups
    assert whole.num_recipes == len(shown) == sum(part.num_recipes for part in parts) == 5
    assert whole.statuses == {"crashed": 1, "done": 3, "out-of-memory": 1}
    assert whole.allocated is not None
    assert (whole.allocated.num_recipes, whole.allocated.num_exact) == (3, 1)
    assert whole.allocated.worst == pytest.approx(0.1, abs=1e-6)
    held_out = sum(is_held_out(one.recipe.id) for one in shown)
    assert sum(part.num_recipes for part in parts if part.name.startswith("held out")) == held_out
    compiled = [part for part in parts if part.name.endswith("compiled")]
    assert [part.num_recipes for part in compiled] == [1]


def test_times_verdicts_and_the_worst() -> None:
    accuracy, _ = judge(suite(), {})
    times = accuracy.groups[0].times
    assert times is not None
    # Expected 1 s and measured 1.5 s each; bounds hold the first (0.5 .. 1.5), not the second (to 0.9), and the third has none.
    assert (times.num_recipes, times.num_inside, times.median) == (3, 1, 1.5)
    assert accuracy.verdicts.fits_and_ran == 3
    assert accuracy.verdicts.fits_but_out_of_memory == 1
    assert [text.split(",")[0] for text in accuracy.verdicts.wrong] == ["out"]
    worst = accuracy.worst["allocated"]
    assert [one.recipe.split(",")[0] for one in worst] == ["high", "low", "exact"]
    assert worst[0].error_bytes == round(11.0 * GIB) - round(10.0 * GIB)


def test_a_trial_without_a_result_is_listed_with_its_message_and_cause() -> None:
    crash = next(record.recipe_id for record in suite() if record.recipe["model"]["name"] == "crash")
    accuracy, _ = judge(suite(), {crash: "the model | ends at 2048"})
    assert [(one.status, one.message) for one in accuracy.unfinished] == [
        ("crashed", "ended in step 1 ... last line")
    ]
    assert "the model \\| ends at 2048" in page(accuracy)


def test_recipes_with_one_side_only_are_told() -> None:
    """Also a crash that was never predicted (because predict refuses the recipe) stays on the page."""
    alone, refused = recipe("alone"), recipe("refused")
    crash = with_error(measured(refused, 1.0), "crashed", "ended in step 1")
    accuracy, _ = judge([*suite(), predicted(alone, 1.0), crash], {})
    assert len(accuracy.not_measured) == 1
    assert [text.split(",")[0] for text in accuracy.not_predicted] == ["refused"]
    assert accuracy.not_predicted[0].endswith("(crashed)")
    assert sorted(one.recipe.split(",")[0] for one in accuracy.unfinished) == ["crash", "refused"]
    assert accuracy.groups[0].num_recipes == 5


def test_the_same_records_give_the_same_bytes_in_any_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [record.model_dump_json() + "\n" for record in suite()]
    made: list[dict[str, bytes]] = []
    for folder, order in (("a", lines), ("b", lines[::-1])):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "records.jsonl").write_text("".join(order))
        assert (
            main([f"{tmp_path}/{folder}/records.jsonl", "--into", f"{tmp_path}/{folder}/docs/accuracy.md"])
            == 0
        )
        files = sorted((tmp_path / folder / "docs").rglob("*.*"))
        made.append({str(file.relative_to(tmp_path / folder)): file.read_bytes() for file in files})
    assert made[0] == made[1]
    svgs = [content for name, content in made[0].items() if name.endswith(".svg")]
    assert len(svgs) == 3
    for svg in svgs:
        assert ET.fromstring(svg).tag.endswith("svg")
    assert "all: 5 recipes (1 crashed, 3 done, 1 out-of-memory)" in capsys.readouterr().out


def test_json_is_one_object_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "records.jsonl").write_text("".join(record.model_dump_json() + "\n" for record in suite()))
    assert main([f"{tmp_path}/records.jsonl", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["groups"][0]["allocated"]["num_exact"] == 1


def test_causes_are_read_beside_the_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    high = next(record.recipe_id for record in suite() if record.recipe["model"]["name"] == "high")
    (tmp_path / "records.jsonl").write_text("".join(record.model_dump_json() + "\n" for record in suite()))
    (tmp_path / "causes.toml").write_text(f'[causes]\n"{high}" = "a known one"\n')
    assert main([f"{tmp_path}/records.jsonl"]) == 0
    assert "cause: a known one" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["[causes", "[causes]\nabc = 3\n"])
def test_damaged_causes_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "causes.toml").write_text(text)
    with pytest.raises(InputError, match=r"causes\.toml"):
        read_causes(tmp_path / "causes.toml")


def test_records_of_one_kind_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "records.jsonl").write_text(suite()[0].model_dump_json() + "\n")
    assert main([f"{tmp_path}/records.jsonl"]) == 65
    assert "no recipe has both" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "0 %"), (1e-9, "< 0.0001 %"), (0.00012, "+0.0120 %"), (-0.0123, "-1.23 %"), (0.1679, "+16.79 %")],
)
def test_a_share_that_is_not_0_never_reads_0(value: float, shown: str) -> None:
    assert share(value, signed=True) == shown


def test_the_page_in_the_docs_is_made_from_the_records_in_results(tmp_path: Path) -> None:
    files = sorted((ROOT / "results").glob("*.jsonl"))
    if not files:
        pytest.skip("no records in results/ yet")
    assert main([*map(str, files), "--into", str(tmp_path / "accuracy.md")]) == 0
    made = (tmp_path / "accuracy.md").read_text()
    assert made == (ROOT / "docs/results/accuracy.md").read_text(), (
        "run the command that the page's top names"
    )
    # The plots' bytes depend on matplotlib's version, so only that they are there.
    assert sorted(file.name for file in (tmp_path / "plots").iterdir()) == sorted(
        file.name for file in (ROOT / "docs/results/plots").glob("accuracy-*.svg")
    )


def test_the_halves_are_about_even_and_fixed() -> None:
    ids = [f"{number:016x}" for number in range(2000)]
    share_held_out = sum(map(is_held_out, ids)) / len(ids)
    # Five standard deviations of a fair coin thrown 2000 times are 0.056.
    assert abs(share_held_out - 0.5) < 0.056
    # The first byte of sha256("held-out 1b35129e6cd28e75") is 25, of "held-out d07def421706fe4c" c7: odd is held out.
    assert is_held_out("1b35129e6cd28e75") is True
    assert is_held_out("d07def421706fe4c") is True
