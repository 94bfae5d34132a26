"""The generated pages of the peak-memory experiment: what is not measured says so, endings are told, verdicts are computed,
and the committed pages are what the committed records give."""

import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_report import measured, predicted

from trainfit.report import beat_it, budgets, optimizer_in_backward, peak_memory, recompute_budget
from trainfit.report.page_file import Page
from trainfit.report.peak_memory_tables import changes, memory_table, speed_table
from trainfit.report.published import read_published
from trainfit.report.sweep_results import NOT_YET, SweepResult, read_result
from trainfit.spec.errors import InputError
from trainfit.spec.provenance import new_record
from trainfit.spec.result import Outcome, Record
from trainfit.spec.sweep import Variant
from trainfit.sweeps.read import read_sweep

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
SWEEP = RECIPES / "peak-memory" / "sweep.yaml"
EIGHT = RECIPES / "recompute-budget" / "llama-3.1-8b.yaml"


@pytest.fixture(autouse=True)
def _no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINFIT_COMMIT", "abc")  # no git process for each record


def outcome(status: str = "done", message: str = "") -> Outcome:
    return Outcome.model_validate(
        {"status": status, "message": message, "seconds": 1.0, "request_id": "0" * 16}
    )


def foretold(one: Variant, gib: float, step_s: float = 1.0, **fields: Any) -> Record:
    record = predicted(one.recipe, gib, step_s=step_s, **fields)
    return record.model_copy(update={"outcome": outcome()})


def trained(one: Variant, gib: float, speed: float, perplexity: float, steps: int = 100) -> Record:
    """``speed``: samples a second of all steps; the late ones are a tenth faster."""
    summary = {
        "status": "done", "peak_memory_bytes": round(gib * 2**30), "eval_perplexity": perplexity, "mfu": 0.4, "hfu": 0.5,
        "run": {"device": "NVIDIA H200", "steps": steps},
        "speed": {"samples_per_s": speed, "late_samples_per_s": speed * 1.1, "late_from_step": 10, "step_s": []},
    }  # fmt: skip
    return new_record("train", one.recipe, train=summary, outcome=outcome())


def failed(one: Variant, kind: Any, status: str) -> Record:
    return new_record(kind, one.recipe, outcome=outcome(status, "told why"))


def timed(one: Variant, gib: float, step_s: float) -> Record:
    return measured(one.recipe, gib, step_s=step_s).model_copy(update={"outcome": outcome()})


def result_of(
    tmp_path: Path, file: Path, records: Callable[[dict[str, Variant]], list[Record]]
) -> SweepResult:
    sweep = read_sweep(file)
    folder = tmp_path / sweep.name
    folder.mkdir(parents=True, exist_ok=True)
    made = records({one.name: one for one in sweep.variants})
    (folder / "records.jsonl").write_text("".join(f"{record.model_dump_json()}\n" for record in made))
    return read_result(file, tmp_path)


def some(variants: dict[str, Variant]) -> list[Record]:
    """The control, one row of each ending, two goals met, all others predicted only; one row not even that."""
    records = [foretold(one, 10.0) for name, one in variants.items() if name != "bf16"]
    v = variants
    return [
        *records,
        trained(v["control"], 20.0, 4.0, 150.0),
        foretold(v["best_fast"], 2.0, 0.2), trained(v["best_fast"], 1.99, 10.0, 151.0),
        failed(v["checkpoint"], "train", "out-of-memory"),
        failed(v["compile"], "train", "timeout"),
        trained(v["bf16_fused_checkpoint"], 4.0, 9.5, 180.0),
    ]  # fmt: skip


def cells(table: str, row: str) -> list[str]:
    (line,) = [line for line in table.splitlines() if line.startswith(f"| `{row}` |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_every_ending_and_what_is_missing_is_told(tmp_path: Path) -> None:
    result = result_of(tmp_path, SWEEP, some)
    published = read_published(SWEEP.parent / "published.toml")
    table = memory_table(result, published)
    assert cells(table, "checkpoint")[3] == "out of memory"
    assert cells(table, "compile")[3] == "out of time"
    assert cells(table, "fused")[2:4] == ["10.000", NOT_YET]
    assert cells(table, "bf16")[2:4] == ["not predicted yet", NOT_YET]
    # 10 GiB predicted, 20 measured; 21.165 published.
    assert cells(table, "control")[2:] == [
        "10.000",
        "20.000",
        "-50.00 %",
        "0.0 %",
        "0.0 %",
        "–",
        "21.165",
        "0.0 %",
        "0.945",
    ]
    assert cells(table, "bf16_fused_checkpoint")[6:] == ["80.0 %", "–", "3.975", "81.2 %", "1.006"]
    speed = cells(speed_table(result, published), "best_fast")
    assert speed[3:9] == ["10", "2.50", "11", "2.50", "40.0 %", "50.0 %"]
    assert result.sentence().startswith(
        "5 of 19 rows were run on NVIDIA H200; the others are not measured yet"
    )


def test_the_goals_are_judged_by_what_was_measured(tmp_path: Path) -> None:
    small, least, peaks = beat_it.verdicts(result_of(tmp_path, SWEEP, some), "control")
    assert small.state == least.state == beat_it.MET
    assert "best_fast" in small.why
    assert "bf16_fused_checkpoint" not in small.why  # 80 % and a perplexity of +20 %
    assert peaks.state == beat_it.NOT_MET  # the control is 50 % off
    assert "`control`" in peaks.why


@pytest.mark.parametrize(
    ("gib", "speed", "perplexity", "states"),
    [
        (2.0, 9.2, 151.4, ("met", "met")),
        (2.9, 9.2, 151.4, ("met", "not met")),
        (3.1, 9.2, 150.0, ("not met", "not met")),  # 84.5 %
        (2.0, 9.1, 150.0, ("not met", "met")),  # 2.275 times
        (2.0, 9.2, 151.6, ("not met", "not met")),  # +1.07 %
        (2.0, 9.2, 148.4, ("not met", "not met")),  # -1.07 %: another training than the control's
    ],
)
def test_each_part_of_a_goal_counts(
    tmp_path: Path, gib: float, speed: float, perplexity: float, states: tuple[str, str]
) -> None:
    def records(variants: dict[str, Variant]) -> list[Record]:
        rows = [trained(one, 20.0, 4.0, 150.0) for name, one in variants.items() if name != "best_fast"]
        return [*rows, trained(variants["best_fast"], gib, speed, perplexity),
                *(foretold(one, 20.0) for one in variants.values())]  # fmt: skip

    found = beat_it.verdicts(result_of(tmp_path, SWEEP, records), "control")
    assert (found[0].state, found[1].state) == states


def test_perplexities_of_a_few_steps_judge_nothing(tmp_path: Path) -> None:
    ladder = SWEEP.parent.parent / "ladder" / "qwen3-4b.yaml"

    def records(variants: dict[str, Variant]) -> list[Record]:
        rows = [
            trained(one, 20.0, 4.0, 2000.0, 12) for name, one in variants.items() if name != "best_native"
        ]
        return [*rows, trained(variants["best_native"], 1.0, 16.0, 2000.0, 12)]

    goal, _ = beat_it.verdicts(result_of(tmp_path, ladder, records), "control")
    assert goal.state == beat_it.NO_CONTROL
    assert "12 steps only" in goal.why
    assert "`best_native`, 95.0 % less, 4.00 times" in goal.why
    assert "perplexity +" not in goal.why


def test_nothing_measured_is_no_verdict_and_names_what_is_predicted(tmp_path: Path) -> None:
    def records(variants: dict[str, Variant]) -> list[Record]:
        return [foretold(one, 1.0 if name == "best_fast" else 20.0, 0.2 if name == "best_fast" else 1.0) for name, one in variants.items()]  # fmt: skip

    found = beat_it.verdicts(result_of(tmp_path, SWEEP, records), "control")
    assert [verdict.state for verdict in found] == [NOT_YET] * 3
    assert "`best_fast` (95.0 % less, 5.00 times)" in found[0].why


def test_a_control_that_does_not_fit_is_said_and_nothing_is_compared_with_it(tmp_path: Path) -> None:
    def records(variants: dict[str, Variant]) -> list[Record]:
        control = variants["control"]
        return [foretold(control, 220.0, fits=False), failed(control, "train", "out-of-memory"), trained(variants["bf16"], 80.0, 4.0, 9.0)]  # fmt: skip

    result = result_of(tmp_path, SWEEP, records)
    verdict, _ = beat_it.verdicts(result, "control")
    assert verdict.state == beat_it.NO_CONTROL
    assert "`bf16` with 80.00 GiB; the control is predicted to need 220.00" in verdict.why
    assert cells(memory_table(result), "control")[2:4] == ["220.000 (does not fit)", "out of memory"]


def test_compiled_rows_may_be_three_per_cent_off(tmp_path: Path) -> None:
    def records(off: float) -> Callable[[dict[str, Variant]], list[Record]]:
        return lambda variants: [
            record
            for one in variants.values()
            for record in (
                foretold(one, 20.0 * (1 + off) if one.recipe.compile else 20.0),
                trained(one, 20.0, 4.0, 9.0),
            )
        ]

    assert beat_it.peaks_verdict(result_of(tmp_path, SWEEP, records(0.029)).rows).state == beat_it.MET
    assert beat_it.peaks_verdict(result_of(tmp_path, SWEEP, records(0.031)).rows).state == beat_it.NOT_MET


def eight(full: float, ours: float, ours_s: float) -> Callable[[dict[str, Variant]], list[Record]]:
    def records(variants: dict[str, Variant]) -> list[Record]:
        sizes = {"full": (full, 1.25), "ours 60.7 GiB": (ours, ours_s)}
        found = []
        for name, one in variants.items():
            gib, step_s = sizes.get(name, (64.0 if name.startswith("ours") else 96.0, 1.0))
            found += [foretold(one, gib, step_s), timed(one, gib, step_s)]
        return found

    return records


@pytest.mark.parametrize(
    ("ours", "ours_s", "states"),
    [(60.6, 1.039, ("met", "met")), (60.6, 1.041, ("not met", "met")), (60.71, 1.0, ("not met", "not met"))],
)
def test_a_budget_is_judged_by_memory_time_and_its_own_limit(
    tmp_path: Path, ours: float, ours_s: float, states: tuple[str, str]
) -> None:
    result = result_of(tmp_path, EIGHT, eight(60.7, ours, ours_s))
    found = budgets.full_at_no_cost(result, "none", "full"), budgets.never_over(result.rows)
    assert tuple(verdict.state for verdict in found) == states
    table = budgets.budget_table(result, "none")
    assert cells(table, "ours 60.7 GiB")[-1] == ("yes" if states[1] == "met" else "no")


def test_a_newer_record_counts_and_other_training_is_refused(tmp_path: Path) -> None:
    def twice(variants: dict[str, Variant]) -> list[Record]:
        control = variants["control"]
        return [failed(control, "train", "timeout"), trained(control, 20.0, 4.0, 150.0)]

    assert result_of(tmp_path, SWEEP, twice).row("control").measured_bytes == 20 * 2**30
    with pytest.raises(InputError, match="control was trained for 50 steps, the sweep's file asks 100"):
        result_of(
            tmp_path, SWEEP, lambda variants: [trained(variants["control"], 20.0, 4.0, 150.0, steps=50)]
        )


def test_changes_name_fields_and_nothing_that_is_equal() -> None:
    rows = {row.variant: row.recipe for row in read_result(SWEEP, Path("nowhere")).rows}
    told = changes(rows["fused_memory_budget_05"], rows["control"])
    assert told == "`recompute: {budget: 0.05}`, `compile: model`, `optimizer.in_backward: true`"
    assert changes(rows["control"], rows["control"]) == "–"


def test_the_page_of_a_half_run_sweep_shows_each_plot_it_names(tmp_path: Path) -> None:
    result_of(tmp_path / "results", SWEEP, some)
    assert peak_memory.main(["--recipes", str(RECIPES), "--results", str(tmp_path / "results"), "--into", str(tmp_path / "page.md")]) == 0  # fmt: skip
    text = (tmp_path / "page.md").read_text()
    plots = {file.name: file.read_text() for file in (tmp_path / "plots").iterdir()}
    assert len(plots) == 4  # nothing of the other sweeps is there to draw
    for name, svg in plots.items():
        assert f"](plots/{name})" in text
        assert ET.fromstring(svg).tag.endswith("svg")
    assert text.count("](plots/") == len(plots)
    assert "another GPU" in text


def same_as_committed(page: Page, name: str, command: str) -> None:
    assert page.text == (ROOT / "docs/results" / name).read_text(encoding="utf-8"), command
    # The plots' bytes depend on matplotlib's version, so only that they are there.
    for plot in page.plots:
        assert (ROOT / "docs/results/plots" / plot).is_file(), command


@pytest.mark.parametrize(
    ("module", "name"), [(peak_memory, "peak-memory.md"), (recompute_budget, "recompute-budget.md")]
)
def test_the_committed_page_is_what_the_records_give(
    module: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    same_as_committed(
        module.make_page(Path("recipes"), Path("results")), name, "run the command on the page's top"
    )


def test_the_committed_answer_is_what_the_ledgers_show() -> None:
    rows = optimizer_in_backward.read_rows(
        ROOT / "results/peak-memory/explained.jsonl", RECIPES / "peak-memory"
    )
    page = Page(optimizer_in_backward.page(rows, read_published(SWEEP.parent / "published.toml")), {optimizer_in_backward.PLOT: ""})  # fmt: skip
    same_as_committed(page, "optimizer-in-backward.md", "run the command that the page's top names")
