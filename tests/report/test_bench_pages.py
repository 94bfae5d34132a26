"""The pages of ``docs/results/bench`` are those that the records in ``results/`` make, whole and in order however the records came."""

import re
from pathlib import Path
from typing import Any

from trainfit.records import load
from trainfit.report.bench_merge import merged
from trainfit.report.bench_pages import pages
from trainfit.report.bench_panels import colours_of
from trainfit.report.bench_plot import AXES, panels_of, plot_of
from trainfit.spec.bench import BenchResult, BenchRow, Cell, Environment, Spread
from trainfit.spec.provenance import new_bench_record
from trainfit.spec.result import Record

ROOT = Path(__file__).parents[2]
WHERE = Environment(device="a GPU", device_bytes=1, torch="2.11.0", python="3.11", platform="linux")


def record(experiment: str, rows: list[BenchRow], day: int) -> Record:
    result = BenchResult(
        experiment=experiment, form="full", rows=tuple(rows), environment=WHERE, limit_s=1.0, elapsed_s=1.0
    )
    made = new_bench_record(result)
    return made.model_copy(update={"created_at": f"2026-11-{day:02}T00:00:00+00:00"})


def row(point: dict[str, Cell], seconds: float | None, **numbers: Any) -> BenchRow:
    if seconds is None:
        return BenchRow(point=point, status="not-run", message="no time")
    return BenchRow(point=point, status="done", times=Spread.of([seconds] * 10), numbers=numbers)


def step(model: str, mode: str, seconds: float | None, warm_up: int = 5) -> BenchRow:
    parts = ("forward", "backward", "optimizer", "total")
    numbers = {f"{part}_{of}_s": seconds for part in parts for of in ("mean", "std")} if seconds else {}
    return row({"model": model, "precision": "bf16", "compile": mode, "warm-up": warm_up}, seconds, **numbers)


def test_the_pages_in_the_docs_are_made_from_the_records_in_results() -> None:
    made = pages(load(ROOT / "results/bench.jsonl"))
    there = {file.stem: file.read_text() for file in (ROOT / "docs/results/bench").glob("*.md")}
    assert {name: page.text for name, page in made.items()} == there, (
        "run the command that a page's top names"
    )
    # The plots' bytes depend on matplotlib's version, so only that they are there.
    plots = {file.name for file in (ROOT / "docs/results/bench/plots").iterdir()}
    assert {name for page in made.values() for name in page.plots} == plots


def test_rows_stand_in_the_experiments_order_however_the_records_came() -> None:
    a, b, c, d = ({"method": name} for name in "abcd")
    first = record("accumulation", [row(a, 1.0), row(b, None), row(d, 1.0)], 1)
    second = record("accumulation", [row(b, 2.0), row(c, 2.0), row(d, None)], 2)
    for records in ([first, second], [second, first]):
        (one,) = merged(records)
        assert [(row.point["method"], row.status) for row in one.result.rows] == [(x, "done") for x in "abcd"]


def test_a_list_of_what_was_found_is_of_one_record() -> None:
    def top(kernel: str, model: str) -> BenchRow:
        return row({"model": model, "top of": "forward", "operation": "mm", "kernel": kernel}, 1.0)

    old = record("kernels", [top("old", "small"), top("older", "small"), top("kept", "xl")], 1)
    new = record("kernels", [top("new", "small")], 2)
    (one,) = merged([old, new])
    assert {row.point["kernel"] for row in one.result.rows} == {"new", "kept"}


def test_a_line_of_which_nothing_was_run_is_left_out_and_counted() -> None:
    def of(seq: int, body: str, seconds: float | None) -> BenchRow:
        point: dict[str, Cell] = {
            "dtype": "bf16",
            "heads": 16,
            "head": 64,
            "seq": seq,
            "body": body,
            "pass": "both",
        }
        return row(point, seconds, **({"tflops_per_s": 321.0} if seconds else {}))

    rows = [of(1024, "ours", 1.0), of(1024, "flash", None), of(2048, "ours", None), of(2048, "flash", None)]
    rows.append(of(512, "ours", 1.0))
    text = pages([record("flash", rows, 1)])["flash"].text
    assert "| 1024 | 321 | not-run |" in text
    assert "| 512 | 321 |  |" in text
    assert "| 2048 |" not in text
    assert text.count("3 of 5 points were not run") == 1
    assert "not-run: no time" not in text


def test_a_tables_line_that_was_not_run_is_left_out_where_nothing_stands_side_by_side() -> None:
    text = pages([record("accumulation", [row({"method": "naive"}, 1.0), row({"method": "Kahan"}, None)], 1)])
    assert "| Kahan |" not in text["accumulation"].text
    assert "1 of 2 points were not run" in text["accumulation"].text


def test_steps_are_by_size_and_eager_blocks_and_whole_model_stand_side_by_side() -> None:
    unsteady = step("xl", "block", 0.2).model_copy(
        update={"status": "unsteady", "message": "m", "times": Spread.of([0.1, 0.2, 0.3])}
    )
    records = [
        record("transformer", [step("small", "model", 0.012), step("medium", "model", None)], 1),
        record(
            "transformer", [unsteady, step("small", "false", 0.0451), step("xl", "false", 0.3, warm_up=0)], 2
        ),
        record("transformer", [step("medium", "false", 0.1)], 3),
    ]
    text = pages(records)["transformer"].text
    table = text.partition("median, ms\n\n")[2].partition("\n\n")[0].splitlines()
    assert table[0] == "| model | precision | eager | blocks | whole model |"
    assert table[2:] == [
        "| small | bf16 | 45.1 |  | 12.0 |",
        "| medium | bf16 | 100 |  | not-run |",
        "| xl | bf16 |  | 200 (unsteady, 100%) |  |",
    ]
    assert "*Unsteady*: ten steps did not tell the median within 10 %." in text
    assert "### xl: mean ± standard deviation of ten steps, ms" in text
    assert "| bf16 | eager | 0 | 300 ± 300 | 300 ± 300 | 300 ± 300 | 300 ± 300 | 300 |" in text


def test_what_was_said_stands_beside_what_was_measured() -> None:
    components = {"(logits)": "fp16", "loss": "fp32"}
    rows = [
        BenchRow(
            point={"device": "cuda", "autocast": "fp16", "component": name},
            status="done",
            numbers={"dtype": dtype},
        )
        for name, dtype in components.items()
    ]
    text = pages([record("autocast", rows, 1)])["autocast"].text
    claims = text.partition("## What published results got wrong")[2].partition("\n## ")[0]
    assert "- Said: The loss is fp16" in claims
    assert "  - Measured on a GPU: the loss is fp32, the logits are fp16 (cuda fp16)." in claims


def test_steps_are_drawn_in_a_panel_for_each_compilation_with_a_legend_of_precisions() -> None:
    rows = [step("small", mode, 0.1) for mode in ("model", "false", "block")] + [step("xl", "false", None)]
    result = record("transformer", rows, 1).bench
    assert result is not None
    panels = panels_of(result, AXES["transformer"])
    assert [panel.title for panel in panels] == ["eager", "compiled: blocks", "compiled: whole model"]
    assert all(set(panel.drawn) == {"bf16"} for panel in panels)
    assert panels[0].missing == {("bf16", "xl"): "not-run"}
    assert panels[0].drawn["bf16"] == [("small", 100.0)]  # Milliseconds.
    svg = plot_of(result)
    assert svg is not None
    assert svg.startswith("<svg")


def test_no_two_lines_of_a_committed_plot_have_a_colour() -> None:
    for one in merged(load(ROOT / "results/bench.jsonl")):
        if one.result.experiment in AXES:
            panels = panels_of(one.result, AXES[one.result.experiment])
            names = list(dict.fromkeys(name for panel in panels for name in panel.drawn))
            colours = [colour for colour, _ in colours_of(names).values()]
            assert len(set(colours)) == len(names) > 0
    kernels = (ROOT / "docs/results/bench/plots/kernels-h200.svg").read_text()
    assert len(set(re.findall(r"fill: (#[0-9a-f]{6}); stroke: #ffffff", kernels))) >= 13


def test_rows_of_other_keys_are_tables_of_their_own() -> None:
    """16 heads by each kernel say which mask they have, the course's one head says nothing of it."""

    def of(heads: int, **more: Cell) -> BenchRow:
        point: dict[str, Cell] = {
            "dtype": "bf16",
            "heads": heads,
            "head": 64,
            **more,
            "seq": 256,
            "body": "ours",
            "pass": "both",
        }
        return row(point, 1.0, host_s=1.0)

    page = pages([record("attention", [of(1), of(16, mask="none"), of(16, mask="additive")], 1)])[
        "attention"
    ].text
    tables = [part for part in page.split("\n\n") if part.startswith("| ")]
    assert [table.count("| additive |") for table in tables] == [0, 1, 0, 1]  # Medians, then the host's.
