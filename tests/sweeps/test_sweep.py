"""Sweeps: every way a trial can end is a row, the others are untouched, and what is done is kept."""

import importlib
import io
import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from tiny_sweep import BASE, sweep_of
from trainfit.cli.main import main
from trainfit.measurement import process
from trainfit.measurement.fork_server import ready_to_fork
from trainfit.records import read_jsonl
from trainfit.report import sweep as report
from trainfit.report.html import sweep_page as page
from trainfit.report.sweep import markdown_table, text_table, unit
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.provenance import from_line
from trainfit.spec.result import Estimate, MemoryBreakdown, PhasePeaks, Phases
from trainfit.spec.sweep import Row, front, frontier
from trainfit.spec.units import GIB, MIB
from trainfit.sweeps import parts
from trainfit.sweeps.journal import LOGS, RECORDS, Journal
from trainfit.sweeps.parts import PartRequest, run_part
from trainfit.sweeps.rows import rows_of
from trainfit.sweeps.run import Run
from trial_start import forked

ENDINGS = (
    BASE
    + """
name: endings
list:
  - {name: fine}
  - {name: also fine, seed: 1}
  - {name: impossible, optimizer: {in_backward: true, clip_norm: 1.0}}
  - {name: too long, batch.seq: 128, model: {config: {model_type: gpt2, n_embd: 32, n_layer: 1, n_head: 2,
    vocab_size: 384, n_positions: 64}}}
  - {name: too large, batch.micro: 16384}
  - {name: too slow, batch.accumulate: 2, seed: 4}
  - {name: exits, seed: 5}
  - {name: faults, seed: 6}
  - {name: killed, seed: 7}
measure: {steps: 2, warmup: 0}
train: {steps: 12, data: "stories:60", eval_fraction: 0.1, eval_sequences: 8}
limits: {seconds: 60, memory_gib: 0.25}
"""
)
INSTEAD = {
    "too slow": "sleep 300 & sleep 300",
    "exits": "echo the reason >&2; exit 3",
    "faults": "kill -SEGV $$",
    "killed": "kill -KILL $$",
}
"""What runs instead of the measurement of these variants."""


class Forks:
    """Executor that runs each part in a fork of this process, one after another, and notes it."""

    def __init__(self) -> None:
        self.ran: list[tuple[str, str]] = []

    def run(self, requests: Sequence[PartRequest], *, stop: Any, on_start: Any) -> Iterator[Any]:
        for request in requests:
            if stop():
                return
            on_start(request)
            self.ran.append((request.part, request.variant))
            script = INSTEAD.get(request.variant) if request.part == "measure" else None
            if script is None:
                yield request, run_part(request, forked)
            else:
                quick = request.model_copy(update={"timeout_s": 1.0})
                yield request, run_part(quick, lambda folder, module, script=script: shell(script, folder))


def shell(script: str, folder: Path) -> int:
    with open(folder / process.LOG, "wb") as log:
        run = subprocess.Popen(["sh", "-c", script], stdout=log, stderr=log, start_new_session=True)
    run.returncode = 0
    return run.pid


def swept(sweep: Any, folder: Path, executor: Any, **how: Any) -> Run:
    with Journal(folder, sweep.name) as journal:
        run = Run(sweep, journal, **how)
        run.go(executor, lambda: False)
    return run


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, dict[str, Row], Forks]:
    for module in ("trainfit.training.loop", "trainfit.prediction.trace"):  # Once, not in each copy.
        importlib.import_module(module)
    ready_to_fork("cpu")
    folder = tmp_path_factory.mktemp("endings")
    sweep, forks = sweep_of(folder, ENDINGS), Forks()
    run = swept(sweep, folder / "out", forks)
    return sweep, folder / "out", {row.variant: row for row in run.rows()}, forks


ENDS = {
    "fine": ("done", ""),
    "also fine": ("done", ""),
    "impossible": ("refused", "set optimizer.in_backward: false"),
    "too long": ("refused", "64 learned positions"),
    "too large": ("out-of-memory", ""),
    "too slow": ("timeout", "after 1 s"),
    "exits": ("crashed", "the reason"),
    "faults": ("crashed", "signal 11"),
    "killed": ("killed", "signal 9"),
}


def test_every_ending_is_a_typed_row_and_costs_only_itself(ended: Any):
    _, folder, rows, forks = ended
    assert {name: row.status for name, row in rows.items()} == {name: end[0] for name, end in ENDS.items()}
    for name, (_, message) in ENDS.items():
        assert message in rows[name].message
    assert [name for part, name in forks.ran if part == "train"] == ["fine", "also fine"]
    assert ("predict", "impossible") not in forks.ran  # refused before a process is started
    assert rows["killed"].predicted_bytes == rows["fine"].predicted_bytes
    assert "the reason" in next((folder / LOGS).glob("exits-*-measure.txt")).read_text()


def test_tokens_of_pairs_and_of_policies_are_counted_as_predicted() -> None:
    files = sorted((Path(__file__).parents[2] / "evidence/records/rl-phases").glob("*-measured.jsonl"))
    found = [one for file in files for one in read_jsonl(file) if one.measurement is not None]
    for one in found:
        measurement = one.measurement
        assert measurement is not None
        if measurement.status != "done":
            continue
        row = Row(
            variant="a", recipe=one.recipe or {}, recipe_id=one.recipe_id or "", status="done",
            measurement=measurement, outcomes={"measure": one.outcome} if one.outcome else {},
        )  # fmt: skip
        loop = measurement.loop
        expected = measurement.tokens_per_s
        if loop is not None:
            expected = loop.longest.new_tokens_per_s if loop.longest else None
        if expected is not None:
            assert row.tokens_per_s == pytest.approx(expected)
        if row.recipe["objective"]["name"] == "dpo":
            assert row.tokens_per_s == pytest.approx(2 * 1024 * (row.samples_per_s or 0), rel=0.01)


def test_what_is_done_is_predicted_measured_and_trained(ended: Any):
    _, _, rows, _ = ended
    fine, other = rows["fine"], rows["also fine"]
    assert fine.predicted_bytes == fine.measured_bytes  # a CPU's live tensors are predicted to the byte
    assert fine.error == 0
    assert fine.samples == 4
    assert fine.tokens_per_s == pytest.approx(32 * (fine.samples_per_s or 0))
    assert fine.train is not None
    seconds = fine.train["speed"]["step_s"]
    assert len(seconds) == 12
    assert fine.train["speed"]["samples_per_s"] == pytest.approx(4 * 12 / sum(seconds))
    assert fine.train["speed"]["late_samples_per_s"] == pytest.approx(4 * 2 / sum(seconds[10:]))
    assert 2 < (fine.perplexity or 0) < 384  # better than guessing among the tokens
    assert fine.perplexity != other.perplexity  # another seed, other weights
    assert not (ended[1] / "run").exists()


def test_records_are_whole_and_tagged(ended: Any):
    _, folder, rows, _ = ended
    records = [json.loads(line) for line in (folder / RECORDS).read_text().splitlines()]
    assert Counter(record["kind"] for record in records) == {"predict": 9, "measure": 8, "train": 2}
    fine = [record for record in records if "variant:fine" in record["tags"]]
    assert [record["kind"] for record in fine] == ["predict", "measure", "train"]
    assert all("sweep:endings" in record["tags"] for record in records)
    assert fine[1]["measurement"]["peak_allocated_bytes"] == rows["fine"].measured_bytes


def test_run_again_does_only_what_has_no_result(ended: Any):
    sweep, folder, rows, _ = ended
    again = Forks()
    run = swept(sweep, folder, again)
    assert again.ran == []
    assert run.num_kept == 19
    assert {row.variant: row.status for row in run.rows()} == {n: row.status for n, row in rows.items()}
    retried = Forks()
    swept(sweep, folder, retried, retry=True)
    assert retried.ran == [("measure", name) for name in INSTEAD]


def test_other_settings_are_another_request(tmp_path: Path, ended: Any):
    _, folder, _, _ = ended
    sweep = sweep_of(tmp_path, ENDINGS.replace("steps: 2, warmup", "steps: 3, warmup"))
    wanted: list[tuple[str, str]] = []

    class Nothing:
        def run(self, requests: Sequence[PartRequest], **_: Any) -> Iterator[Any]:
            wanted.extend((request.part, request.variant) for request in requests)
            return iter(())

    swept(sweep, folder, Nothing())
    assert ("measure", "fine") in wanted
    assert ("train", "fine") not in wanted  # what was predicted and trained still counts
    assert not any(part == "predict" for part, _ in wanted)


def test_one_sweep_at_a_time_writes_to_a_folder(tmp_path: Path):
    with (
        Journal(tmp_path, "one"),
        pytest.raises(InputError, match="another sweep writes in this folder"),
        Journal(tmp_path, "two"),
    ):
        pass


def test_the_page_holds_every_row_and_nothing_from_outside(ended: Any):
    rows = list(ended[2].values())
    text = page("endings", rows, notes=["a <b> c"])
    for row in rows:
        assert f'<td class="">{row.variant}</td>' in text
    assert "a &lt;b&gt; c" in text.lower()
    assert set(re.findall(r"https?://([^/]*)", text)) <= {"www.w3.org", "purl.org", "creativecommons.org"}
    svgs = [part.partition("</svg>")[0] + "</svg>" for part in text.split("<svg")[1:]]
    assert len(svgs) == 4  # memory, speed, perplexity, the front
    for one in svgs:
        ElementTree.fromstring("<svg" + one.replace("xlink:href", "href"))
        assert "var(--ink" in one  # takes the page's colours, light or dark
    table = markdown_table(rows)
    assert table.count("\n") == 2 + len(rows)
    assert f"{ended[2]['fine'].measured_bytes / MIB:,.3f}" in table
    assert unit(rows) == ("MiB", MIB)


def row(name: str, size: int | None, speed: float, seq: int = 10) -> Row:
    samples = {"samples_per_s": speed, "late_samples_per_s": None}
    train = {"status": "done", "peak_memory_bytes": size, "speed": samples}
    recipe = {"batch": {"micro": 1, "accumulate": 1, "seq": seq}}
    return Row(variant=name, recipe=recipe, recipe_id="0", status="done", train=train)


def test_the_front_is_what_nothing_else_beats_in_both_and_only_of_runs_that_ended():
    rows = [row("a", 10, 1.0), row("b", 20, 3.0), row("c", 20, 2.0), row("d", 30, 3.0), row("e", 40, 9.0)]
    assert front([*rows, row("no memory known", None, 99.0)]) == ("a", "b", "e")
    assert front([row("short", 10, 4.0, seq=10), row("long", 20, 3.0, seq=100)]) == ("short", "long")
    assert front([]) == ()
    failed = row("a", 10, 1.0).model_copy(update={"train": {"status": "diverged", "peak_memory_bytes": 5}})
    assert (failed.measured_bytes, failed.samples_per_s, front([failed])) == (None, None, ())


def test_utilisation_is_of_the_users_peak_or_of_the_gpu_that_ran(ended: Any):
    sweep = ended[0]
    request = PartRequest(
        part="measure", variant="a", recipe=sweep.variants[0].recipe, device="cpu", timeout_s=1,
        gpu_peak_flops_per_s=1e15,
    )  # fmt: skip
    assert request.peak_flops_per_s(on_cuda=False) is None
    assert request.peak_flops_per_s(on_cuda=True) == 1e15
    own = request.model_copy(update={"own_peak_flops_per_s": 1e12})
    assert own.peak_flops_per_s(on_cuda=False) == own.peak_flops_per_s(on_cuda=True) == 1e12
    assert own.id == request.id


def test_predict_only_runs_no_step_and_names_the_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, forks = tmp_path / "both.yaml", Forks()
    file.write_text(f"{BASE}list: [{{name: one}}]\nmeasure: {{}}\ntrain: {{steps: 1}}\n")
    monkeypatch.setattr("trainfit.cli.sweep.executing", lambda *_: nullcontext(forks))
    assert main(["sweep", str(file), "--out", str(tmp_path / "out.jsonl"), "--predict-only"]) == 0
    assert forks.ran == [("predict", "one")]
    out = capsys.readouterr().out
    assert "Sweep both: 1 variants" in out
    assert re.search(r"^holds for torch \d\S+, transformers \d\S+$", out, re.M)


class Planner:
    """Executor that predicts a plan for every budget but the smallest, which no plan reaches."""

    def __init__(self) -> None:
        self.built: list[tuple[str, str, Any]] = []

    def run(self, requests: Sequence[PartRequest], *, stop: Any, on_start: Any) -> Iterator[Any]:
        for request in requests:
            self.built.append((request.part, request.variant, request.built.recompute))
            least = request.variant == "least"
            planned = request.recipe.model_copy(update={"recompute": "full"})
            status = "refused" if least else "done"
            message, plan = ("out of reach", None) if least else ("", planned)
            yield request, parts.ended(request, status, message, 1.0, planned=plan)


def test_what_is_planned_for_a_budget_is_what_is_measured(tmp_path: Path) -> None:
    names = "{name: ours, recompute: {budget_gib: 1}}, {name: least, recompute: {budget_gib: 0.001}}"
    sweep, planner = sweep_of(tmp_path, f"{BASE}list: [{names}]\nmeasure: {{}}"), Planner()
    with Journal(tmp_path / "out", "budgets") as journal:
        run = Run(sweep, journal)
        run.go(planner, lambda: False)
        rows = {row.variant: row for row in run.rows()}
    assert planner.built[-1] == ("measure", "ours", "full")
    assert [variant for part, variant, _ in planner.built if part == "measure"] == ["ours"]
    assert (rows["least"].status, rows["least"].message) == ("refused", "out of reach")
    # Read again, the plan is in the journal: nothing is predicted or measured again.
    with Journal(tmp_path / "out", "budgets") as journal:
        records = (tmp_path / "out" / RECORDS).read_text().splitlines()
        assert rows_of(sweep, [from_line(line, RECORDS) for line in records]) == tuple(rows.values())
        again = Run(sweep, journal)
        again.go(planner, lambda: False)
        assert again.num_kept == 3


def predicted_row(
    name: str, device_gib: float, tokens_per_s: float | None, *, fits: bool | None = None
) -> Row:
    """A row of a sweep that only predicts, on a card of 79 GiB."""
    size = round(device_gib * GIB)
    card = 79 * GIB
    estimate = Estimate(
        recipe_id="0", phases=Phases(after_init=1, first=PEAKS, steady=PEAKS), peak_phase="steady.backward",
        breakdown=MemoryBreakdown(weights=size - GIB), peak_allocated_bytes=size - GIB,
        peak_reserved_bytes=size, peak_device_bytes=size, device_bytes=card, params=1, trainable_params=1,
        fits=size <= card if fits is None else fits, model_flops=1.0, hardware_flops=1.0, flops_convention="",
        step_s=None, time=None, tokens_per_s=tokens_per_s, mfu=None, hfu=None, cost=None,
    )  # fmt: skip
    recipe = recipe_from({"model": {"config": "gpt2"}}).content()
    return Row(variant=name, recipe=recipe, recipe_id="0", status="done", estimate=estimate)


PEAKS = PhasePeaks(forward=1, backward=1, optimizer=1)
PREDICTED = (
    predicted_row("small", 40, 1000.0),
    predicted_row("fast", 70, 2000.0),
    predicted_row("beaten", 71, 1500.0),
    predicted_row("over", 79.5, 3000.0),
    predicted_row("in pieces", 78.7, 2500.0, fits=False),
)


def test_a_prediction_has_a_verdict_headroom_and_device_bytes():
    assert [row.verdict for row in PREDICTED] == ["fits", "fits", "fits", "does not fit", "tight"]
    found = PREDICTED[3].numbers()
    assert (found["predicted_device_bytes"], found["device_bytes"]) == (round(79.5 * GIB), 79 * GIB)
    assert found["headroom_bytes"] == -GIB // 2
    head, _, *lines = markdown_table(PREDICTED).splitlines()
    for title in ("verdict", "device GiB", "headroom GiB"):
        assert f" {title} |" in head
    assert "| over | does not fit | 79.50 | -0.50 |" in lines[3]


def test_only_what_fits_is_on_the_predicted_frontier_and_it_is_marked():
    best = frontier(PREDICTED)
    assert best.is_predicted
    assert best.variants == ("small", "fast")
    waiting = PREDICTED[0].model_copy(update={"status": "waiting"})
    assert not frontier([*PREDICTED, waiting]).is_predicted  # What is to be measured has the measured front.
    measured = frontier([*PREDICTED, row("a", 10, 1.0)])
    assert (measured.variants, measured.is_predicted) == (("a",), False)
    marks = [line.startswith("| **") for line in markdown_table(PREDICTED).splitlines()[2:]]
    assert marks == [True, True, False, False, False]
    text = page("predicted", PREDICTED)
    assert text.count('<tr class="best">') == 2
    assert "Memory against speed, predicted" in text
    assert text.count("<svg") == 3  # memory, speed, the predicted frontier


def test_plots_have_a_line_at_the_card_and_show_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "draw", lambda panels, *_, **__: panels[0])
    far = predicted_row("far", 790, 4000.0)
    bars: Any = report.memory_bars([*PREDICTED, far])
    card = {79.0: f"{far.recipe['hardware']['gpu']}: 79.00 GiB"}
    assert bars.limits == card
    fit, over = bars.series
    assert (fit.is_hollow, over.is_hollow, over.label) == (False, True, "predicted: does not fit")
    assert list(fit.y) == [40.0, 70.0, 71.0, None, pytest.approx(78.7), None]
    assert list(over.y) == [None, None, None, 79.5, None, 1.5 * 79]
    assert over.text[-1] == "790.00 (cut)"
    small: Any = report.memory_bars([predicted_row("small", 4, 1000.0)])
    assert small.limits == {}  # The card has twenty times as much, which would flatten the bar.
    points: Any = report.predicted_scatter([*PREDICTED, far])
    assert points.limits == card
    shown = {one.label.partition(":")[0]: [*one.text] for one in points.series}
    assert shown == {
        "frontier": ["small", "fast"],
        "dominated": ["beaten"],
        "tight": ["in pieces"],
        "does not fit": ["over"],
    }
    speeds: Any = report.speed_bars(PREDICTED)
    assert speeds.y_label == "tokens/s"
    assert speeds.series[0].text[:2] == ["1,000", "2,000"]


def test_names_on_points_tell_what_differs():
    names = ["micro=1 recompute=none loss=fused", "micro=1 recompute=full loss=fused",
             "micro=4 recompute=full loss=fused"]  # fmt: skip
    assert report.telling(names) == ["micro=1", "micro=1 full", "micro=4 full"]
    assert report.telling(["recompute=none", "recompute=full"]) == ["recompute=none", "full"]
    for alike in (
        ["a=none b=true", "a=true b=true"],
        ["control", "bf16"],
        ["x=1"],
        [],
        ["a=x b=none", "a=none b=x"],
    ):
        assert len(set(report.telling(alike))) == len(alike)
    assert report.telling(["a=x b=none", "a=none b=x"]) == ["a=x b=none", "a=none b=x"]


def printed(rows: Sequence[Row], width: int) -> list[str]:
    out = Console(width=width, file=io.StringIO(), highlight=False)
    out.print(text_table(rows, width))
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 80, 140])
def test_the_table_fits_the_terminal_and_keeps_the_verdict(width: int):
    lines = printed(PREDICTED, width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "…" not in text
    for words in ("verdict", "does not fit", "* fast", "headroom", "* the predicted frontier"):
        assert words in text
    assert ("device" in lines[0]) == (width >= 80)


def test_a_measured_sweep_shows_device_bytes_in_80_columns():
    measured = row("adafactor-in-backward", 10, 1.0)
    rows = [measured.model_copy(update={"estimate": PREDICTED[0].estimate}), row("control", 20, 2.0)]
    head, _, _, line = printed(rows, 80)[:4]
    assert "device" in head
    assert " 40,960.00 " in line  # MiB, as measured peaks are under one GiB
