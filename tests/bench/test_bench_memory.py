"""``bench memory``: what is tracked on a CPU equals the ledger, to the byte; a published table."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from trainfit.bench.experiments import memory
from trainfit.bench.harness import memory_measure
from trainfit.bench.harness.bench import Bench
from trainfit.bench.harness.memory_prediction import (
    FORWARD_ONLY,
    WHOLE_STEP,
    RunMemory,
    forward_ledger,
    predictions,
)
from trainfit.bench.harness.memory_timeline import BEFORE, Account, Piece, of_ledger
from trainfit.bench.harness.runner import RULES, run
from trainfit.bench.harness.stopwatch import CpuStopwatch
from trainfit.models.native import attention
from trainfit.prediction.estimate import ledger_of, predict
from trainfit.report.bench_plot import plot_of
from trainfit.spec.bench import BenchResult, BenchRow, Curve
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe
from trainfit.spec.recipe_file import recipe_from
from trainfit.spec.units import GIB, MIB
from trainfit.step import assemble

CPU = torch.device("cpu")
POINT: memory.Point = {"model": "tiny-llama-demo", "attention": "eager", "context": 64, "precision": "fp32"}


def bench(ends_at: float = float("inf")) -> Bench:
    return Bench(CPU, "tiny", CpuStopwatch(), None, RULES["tiny"], ends_at)


@pytest.fixture(scope="module")
def tiny() -> BenchResult:
    return run("memory", device="cpu", form="tiny")


def toy() -> Account:
    """4 bytes of weights; in the forward 2 stay and 3 come and go; in the backward 1 comes and the 2 go."""
    account = Account()
    account.begins(Piece(4, "weights", BEFORE, "", ""))
    kept = account.begins(Piece(2, "activations", "forward", "mm", "a.py:1"))
    gone = account.begins(Piece(3, "temporary", "forward", "add", "a.py:2"))
    account.ends(gone, "forward")
    account.begins(Piece(1, "gradients", "backward", "mm", "backward: Mm"))
    account.ends(kept, "backward")
    return account


def test_an_accounts_peaks_and_what_is_alive_at_the_highest() -> None:
    account = toy()
    assert account.peaks() == {BEFORE: 4, "forward": 9, "backward": 7}
    assert [piece.num_bytes for piece in account.at_peak()] == [4, 2, 3]
    whole = account.curve(100)
    assert whole.phases == ("forward", "forward", "forward", "backward", "backward")
    assert whole.columns == {
        "weights": (4, 4, 4, 4, 4), "gradients": (0, 0, 0, 1, 1), "activations": (2, 2, 2, 2, 0),
        "temporary": (0, 3, 0, 0, 0),
    }  # fmt: skip
    # A stretch keeps its highest moment, so no curve loses a peak.
    assert account.curve(2).columns["temporary"] == (3, 0)


def test_a_curves_columns_are_equally_long() -> None:
    with pytest.raises(ValueError, match="equally long"):
        Curve(phases=("forward",), columns={"weights": (1, 2)})


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_what_is_followed_is_what_the_ledger_says(attention: str) -> None:
    recipe = memory.recipe_of(bench(), {**POINT, "attention": attention})
    step = assemble(recipe, CPU)
    batches = step.random_batches()
    once = partial(memory_measure.whole_step, step, batches)
    memory_measure.follow(step, batches, once)
    followed = memory_measure.follow(step, batches, once)
    ledger = of_ledger(ledger_of(recipe), "steady")
    assert followed.peaks() == ledger.peaks()
    for category in ("weights", "gradients", "optimizer", "activations"):
        most = [max(account.curve(10_000).columns[category]) for account in (followed, ledger)]
        assert most[0] == most[1], category


def test_what_dies_after_the_run_is_not_of_the_run() -> None:
    step = assemble(memory.recipe_of(bench(), POINT), CPU)
    batches = step.random_batches()
    account = memory_measure.follow(step, batches, partial(memory_measure.whole_step, step, batches))
    num_events = len(account.events)
    del step, batches
    assert len(account.events) == num_events


def test_scores_come_from_the_line_that_makes_them() -> None:
    recipe = memory.recipe_of(bench(), POINT)
    step = assemble(recipe, CPU)
    batches = step.random_batches()
    account = memory_measure.follow(step, batches, partial(memory_measure.whole_step, step, batches))
    scores = [
        piece for piece in account.pieces if piece.op == "aten.bmm.default" and piece.phase == "forward"
    ]
    assert len(scores) == 2 * 4
    file, _, line = scores[0].where.rpartition(":")
    assert file == "trainfit/models/native/attention.py"
    assert "q_bhsd @ k" in Path(attention.__file__).read_text().splitlines()[int(line) - 1]
    made = {piece.where for piece in account.pieces if piece.category == "gradients"}
    assert "backward: MmBackward0" in made


def test_every_prediction_of_the_tiny_run_is_exact(tiny: BenchResult) -> None:
    rows = [row for row in tiny.rows if "source" in row.point]
    assert [row.point["source"] for row in rows] == ["measured", "predicted"] * 4
    assert all(row.curve is not None for row in rows)
    assert {row.numbers["error"] for row in rows if row.point["source"] == "predicted"} == {"+0.00%"}
    assert {row.numbers["off_by"] for row in rows if row.point["source"] == "predicted"} == {"+0 bytes"}
    for row in rows:
        whole = row.point["pass"] == WHOLE_STEP
        assert ("backward_bytes" in row.numbers) == whole
        # Weights are there before; AdamW's state, twice as much, only from the first update on.
        assert row.numbers["before_bytes"] == pytest.approx(4 * MIB, rel=0.01)


def test_a_table_of_the_course_from_the_ledger_alone() -> None:
    """A published report has 51.39 and 51.38 GiB at contexts 128 and 512 in fp32: first steps."""
    phases = {}
    for context in (128, 512):
        recipe = recipe_from(
            {
                "model": {"config": "2.7b", "implementation": "native"},
                "batch": {"micro": 4, "seq": context},
                "precision": "fp32", "attention": "eager",
                "optimizer": {"name": "adamw", "implementation": "fused"},
                "hardware": {"gpu": "h200"},
            }
        )  # fmt: skip
        phases[context] = predict(recipe).phases
    assert phases[128].first.peak / GIB == pytest.approx(51.39, rel=0.01)
    assert phases[512].first.peak / GIB == pytest.approx(51.38, rel=0.01)
    assert phases[512].steady.peak > 1.1 * phases[128].steady.peak


def test_a_forward_alone_frees_what_it_makes() -> None:
    ledger = forward_ledger(memory.recipe_of(bench(), POINT))
    assert {segment.phase for segment in ledger.segments} == {"init", "data", "forward"}
    account = of_ledger(ledger, "steady")
    assert (
        "activations" not in account.curve(10).columns
        or max(account.curve(10).columns["activations"]) <= 1024
    )
    assert account.peaks()["forward"] < 1.3 * account.peaks()[BEFORE]


def test_out_of_memory_is_one_runs_and_leaves_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> object:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(memory, "whole_step", full)
    predicted = {
        kind: RunMemory(1, {"forward": 2}, 2, None, fits=False) for kind in (FORWARD_ONLY, WHOLE_STEP)
    }
    rows = list(memory._rows(bench(), POINT, memory.recipe_of(bench(), POINT), lambda _: predicted))
    status = {(row.point["pass"], row.point["source"]): row.status for row in rows if "source" in row.point}
    assert status == {
        (WHOLE_STEP, "measured"): "out-of-memory", (WHOLE_STEP, "predicted"): "done",
        (FORWARD_ONLY, "measured"): "done", (FORWARD_ONLY, "predicted"): "done",
    }  # fmt: skip
    assert {row.numbers["fits"] for row in rows if row.point.get("source") == "predicted"} == {False}


def test_the_allocators_peaks_are_by_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    now, highest = [100], [100]

    def allocate(num_bytes: int) -> None:
        now[0] += num_bytes
        highest[0] = max(highest[0], now[0])

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: highest[0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: highest.__setitem__(0, now[0]))

    def once(begin: memory_measure.Begin) -> None:
        for _ in range(2):  # micro-batches: a phase that comes twice has its higher peak
            begin("forward")
            allocate(30)
            begin("backward")
            allocate(20)
            allocate(-45)
        begin("optimizer")
        allocate(1)

    peaks = memory_measure.AllocatorPeaks(torch.device("cuda"), held=60).of(once)
    assert peaks == {"forward": 75, "backward": 95, "optimizer": 51}


def test_without_time_nothing_is_predicted() -> None:
    def predict(recipe: Recipe) -> Any:
        raise AssertionError("must not be predicted")

    rows = list(memory._rows(bench(ends_at=0.0), POINT, memory.recipe_of(bench(), POINT), predict))
    assert [(row.point["pass"], row.point["source"], row.status) for row in rows] == [
        (kind, source, "not-run")
        for kind in (WHOLE_STEP, FORWARD_ONLY)
        for source in ("measured", "predicted")
    ]


def test_the_residual_stream_of_the_course() -> None:
    """4 x 512 x 2560 fp32 values: 20 of what the course calls MB."""
    recipe = recipe_from({"model": {"config": "2.7b"}, "batch": {"micro": 4, "seq": 512}})
    row = memory._residual_row({}, recipe, torch.empty(4, 512, 2560, device="meta"))
    assert row.numbers == {
        "dtype": "float32", "shape": "4 x 512 x 2560", "bytes": 20_971_520,
        "MiB": 20.0, "MB": 20.97152, "GB": 0.02097152,
    }  # fmt: skip


def test_predictions_beside_a_gpu_are_made_where_none_is_seen() -> None:
    recipe = memory.recipe_of(bench(), POINT)
    with predictions([recipe], torch.device("cuda")) as predict_one, predictions([], CPU) as here:
        assert predict_one(recipe) == here(recipe)


def test_snapshots_need_cuda(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="CUDA"):
        run("memory", device="cpu", folder=tmp_path)
    assert memory.snapshot_name({**POINT, "context": 128}, WHOLE_STEP) == ""
    assert memory.snapshot_name(POINT, WHOLE_STEP) == "memory-tiny-llama-demo-fp32-64-whole-step.pickle"


def test_a_run_without_curves_has_no_plot(tiny: BenchResult) -> None:
    bare = BenchRow(point={"tensor": "x"}, status="done", numbers={"bytes": 1})
    plots = memory.EXPERIMENT.plots
    assert plot_of(tiny.model_copy(update={"rows": (bare,)}), plots) is None
    assert plot_of(tiny, plots) is not None


def test_a_point_starts_with_the_workspaces_given_back_and_their_segments_after_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    monkeypatch.setattr(
        torch._C, "_cuda_clearCublasWorkspaces", lambda: done.append("workspaces"), raising=False
    )
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("segments"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: done.append("count") or 7)
    on_gpu = Bench(torch.device("cuda"), "full", CpuStopwatch(), None, RULES["full"], float("inf"))
    assert memory_measure.start_afresh(on_gpu) == 7
    assert done == ["workspaces", "segments", "count"]


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("name", DEVICES)
def test_what_the_backward_makes_is_named_by_its_node_and_its_operation(name: str) -> None:
    device = torch.device(name)
    model = {"config": "tiny-llama-demo", "implementation": "native"}
    step = assemble(
        recipe_from({"model": model, "batch": {"micro": 1, "seq": 32}, "attention": "eager"}), device
    )
    batches = step.random_batches()
    account = memory_measure.follow(
        step, batches, lambda begin: memory_measure.whole_step(step, batches, begin)
    )
    made = [piece for piece in account.pieces if piece.phase == "backward" and piece.num_bytes > 512]
    assert made
    assert {piece.where.partition(": ")[0] for piece in made} == {"backward"}
    operations: dict[str, set[str]] = {}
    for piece in made:
        operations.setdefault(piece.where, set()).add(piece.op)
    assert "aten._softmax_backward_data.default" in operations["backward: SoftmaxBackward0"]
    assert operations["backward: MmBackward0"] == {"aten.mm.default"}
    weights = sum(p.numel() * p.element_size() for p in step.model.parameters() if p.dim() == 2)
    gradients = sum(piece.num_bytes for piece in made if piece.category == "gradients")
    assert gradients >= weights
    forward = [piece for piece in account.pieces if piece.phase == "forward" and piece.num_bytes > 512]
    assert not any(piece.where.startswith("backward") for piece in forward)
