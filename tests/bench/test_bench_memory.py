"""``bench memory``: what is tracked on a CPU equals the ledger, to the byte; a published table."""

import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bench_rows import CPU, result_of, tiny_bench
from trainfit.bench.experiments import memory
from trainfit.bench.harness import memory_measure, memory_prediction
from trainfit.bench.harness.memory_prediction import (
    FORWARD_ONLY,
    WHOLE_STEP,
    RunMemory,
    forward_ledger,
    predict_memory,
    predictions,
)
from trainfit.bench.harness.memory_timeline import BEFORE, Account, Piece, of_ledger
from trainfit.bench.harness.runner import run
from trainfit.catalog.load import gpu
from trainfit.models.native import attention
from trainfit.prediction.predict import ledger_of, predict
from trainfit.report.bench_plot import plot_of
from trainfit.spec.bench import BenchRow, Curve
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.recipe import Recipe
from trainfit.spec.units import GIB, MIB
from trainfit.step import Step, assemble

POINT: memory.Point = {"model": "tiny-llama-demo", "attention": "eager", "context": 64, "precision": "fp32"}
RECIPE = memory.recipe_of(tiny_bench(), POINT)


def follow(step: Step) -> Account:
    """Return the account of one step of the model on its device."""
    batches = step.random_batches()
    return memory_measure.follow(step, batches, partial(memory_measure.whole_step, step, batches))


@pytest.fixture(scope="module")
def first_step() -> Account:
    return follow(assemble(RECIPE, CPU))


def test_an_accounts_peaks_and_what_is_alive_at_the_highest() -> None:
    """4 bytes of weights; in the forward 2 stay and 3 come and go; in the backward 1 comes and the 2 go."""
    account = Account()
    account.begins(Piece(4, "weights", BEFORE, "", ""))
    kept = account.begins(Piece(2, "activations", "forward", "mm", "a.py:1"))
    gone = account.begins(Piece(3, "temporary", "forward", "add", "a.py:2"))
    account.ends(gone, "forward")
    account.begins(Piece(1, "gradients", "backward", "mm", "backward: Mm"))
    account.ends(kept, "backward")
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
    with pytest.raises(ValueError, match="equally long"):
        Curve(phases=("forward",), columns={"weights": (1, 2)})


def test_a_tracked_step_is_that_of_the_ledger() -> None:
    recipe = memory.recipe_of(tiny_bench(), {**POINT, "attention": "sdpa"})
    step = assemble(recipe, CPU)
    follow(step)
    tracked, ledger = follow(step), of_ledger(ledger_of(recipe), "steady")
    assert tracked.peaks() == ledger.peaks()
    for category in ("weights", "gradients", "optimizer", "activations"):
        most = [max(account.curve(10_000).columns[category]) for account in (tracked, ledger)]
        assert most[0] == most[1], category
    num_events = len(tracked.events)
    del step  # What is freed after the run is not part of it.
    assert len(tracked.events) == num_events


def test_scores_come_from_the_line_that_makes_them(first_step: Account) -> None:
    scores = [one for one in first_step.pieces if (one.op, one.phase) == ("aten.bmm.default", "forward")]
    assert len(scores) == 2 * 4
    file, _, line = scores[0].where.rpartition(":")
    assert file == "trainfit/models/native/attention.py"
    assert "q_bhsd @ k" in Path(attention.__file__).read_text().splitlines()[int(line) - 1]


@pytest.mark.parametrize("name", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_storage_of_the_backward_has_its_autograd_node_and_operation(
    name: str, first_step: Account
) -> None:
    account = first_step if name == "cpu" else follow(assemble(RECIPE, torch.device(name)))
    large = [piece for piece in account.pieces if piece.num_bytes > 512]
    made = [piece for piece in large if piece.phase == "backward"]
    assert {piece.where.partition(": ")[0] for piece in made} == {"backward"}
    operations: dict[str, set[str]] = {}
    for piece in made:
        operations.setdefault(piece.where, set()).add(piece.op)
    assert "aten._softmax_backward_data.default" in operations["backward: SoftmaxBackward0"]
    assert operations["backward: MmBackward0"] == {"aten.mm.default"}
    weights = sum(one.num_bytes for one in large if (one.phase, one.category) == (BEFORE, "weights"))
    gradients = sum(piece.num_bytes for piece in made if piece.category == "gradients")
    assert gradients == pytest.approx(weights, rel=0.02)
    assert not any(one.where.startswith("backward") for one in large if one.phase == "forward")


def test_every_prediction_of_the_tiny_run_is_exact() -> None:
    result = run(
        "memory", device="cpu", form="tiny", only={"precision": ["amp-bf16"], "source": [*memory.SOURCES]}
    )
    assert [row.point["source"] for row in result.rows] == ["measured", "predicted"] * 2
    assert all(row.curve is not None for row in result.rows)
    for row in result.rows:
        if row.point["source"] == "predicted":
            assert (row.numbers["error"], row.numbers["off_by"]) == ("+0.00%", "+0 bytes")
        assert ("backward_bytes" in row.numbers) == (row.point["pass"] == WHOLE_STEP)
        # Weights are there before; AdamW's state, twice as much, only from the first update on.
        assert row.numbers["before_bytes"] == pytest.approx(4 * MIB, rel=0.01)
    plots = memory.EXPERIMENT.plots
    assert plot_of(result, plots) is not None
    bare = BenchRow(point={"tensor": "x"}, status="done", numbers={"bytes": 1})
    assert plot_of(result_of(bare, experiment="memory"), plots) is None


def test_a_published_table_from_the_ledger_alone() -> None:
    """A published report has 51.39 and 51.38 GiB at contexts 128 and 512 in fp32: first steps."""
    phases = {}
    for context in (128, 512):
        at = {**POINT, "model": "2.7b", "context": context}
        recipe = memory.recipe_of(tiny_bench(form="full"), at)
        optimizer = {"name": "adamw", "implementation": "fused"}
        fields = recipe.content() | {"optimizer": optimizer, "hardware": {"gpu": "h200"}}
        phases[context] = predict(recipe_from(fields)).phases
    assert phases[128].first.peak / GIB == pytest.approx(51.39, rel=0.01)
    assert phases[512].first.peak / GIB == pytest.approx(51.38, rel=0.01)
    assert phases[512].steady.peak > 1.1 * phases[128].steady.peak


def test_a_forward_alone_frees_what_it_makes() -> None:
    ledger = forward_ledger(RECIPE, gpu(RECIPE.hardware.gpu))
    assert {segment.phase for segment in ledger.segments} == {"init", "data", "forward"}
    account = of_ledger(ledger, "steady")
    assert max(account.curve(10).columns.get("activations", (0,))) <= 1024
    assert account.peaks()["forward"] < 1.3 * account.peaks()[BEFORE]


def rows_of(predict: Callable[[Recipe], Any], **fields: Any) -> dict[tuple[object, ...], BenchRow]:
    rows = memory._rows(tiny_bench(**fields), POINT, RECIPE, predict)
    return {(row.point["pass"], row.point["source"]): row for row in rows if "source" in row.point}


def test_out_of_memory_is_one_runs_and_leaves_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> object:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(memory, "whole_step", full)
    lost = RunMemory(1, {"forward": 2}, 2, None, fits=False)
    rows = rows_of(lambda _: {FORWARD_ONLY: lost, WHOLE_STEP: lost})
    assert {at: row.status for at, row in rows.items()} == {
        (WHOLE_STEP, "measured"): "out-of-memory", (WHOLE_STEP, "predicted"): "done",
        (FORWARD_ONLY, "measured"): "done", (FORWARD_ONLY, "predicted"): "done",
    }  # fmt: skip
    assert {row.numbers["fits"] for at, row in rows.items() if at[1] == "predicted"} == {False}


def test_without_time_nothing_is_predicted() -> None:
    rows = rows_of(lambda recipe: pytest.fail("must not be predicted"), ends_at=0.0)
    assert [row.status for row in rows.values()] == ["not-run"] * 4


@pytest.mark.parametrize(
    ("phases", "before", "expected"),
    [
        ({"forward": 10, "backward": 30}, 5, "+0 bytes"),
        ({"forward": 524_298, "backward": 30}, 5, "+524,288 bytes (forward)"),
        ({"forward": 10, "backward": 30}, 1, "-4 bytes (before)"),
    ],
)
def test_the_worst_phase_of_a_prediction_is_named(phases: dict[str, int], before: int, expected: str) -> None:
    measured, found = (
        RunMemory(5, {"forward": 10, "backward": 30}, 30, None),
        RunMemory(before, phases, 30, None),
    )
    assert memory._row({"source": "predicted"}, found, measured).numbers["phase_off_by"] == expected


def test_the_allocators_peaks_are_by_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    now, highest = [100], [100]

    def allocate(num_bytes: int) -> None:
        now[0] += num_bytes
        highest[0] = max(highest[0], now[0])

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: highest[0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: highest.__setitem__(0, now[0]))

    def once(begin: memory_measure.Begin) -> None:
        for _ in range(2):  # Of micro-batches, a phase that comes twice has its higher peak.
            begin("forward")
            allocate(30)
            begin("backward")
            allocate(20)
            allocate(-45)
        begin("optimizer")
        allocate(1)

    peaks = memory_measure.AllocatorPeaks(torch.device("cuda"), held=60).of(once)
    assert peaks == {"forward": 75, "backward": 95, "optimizer": 51}


def test_the_residual_stream_of_the_course() -> None:
    """4 x 512 x 2560 fp32 values: 20 of what the course calls MB."""
    recipe = recipe_from({"model": {"config": "2.7b"}, "batch": {"micro": 4, "seq": 512}})
    row = memory._residual_row({}, recipe, torch.empty(4, 512, 2560, device="meta"))
    assert row.numbers == {
        "dtype": "float32", "shape": "4 x 512 x 2560", "bytes": 20_971_520,
        "MiB": 20.0, "MB": 20.97152, "GB": 0.02097152,
    }  # fmt: skip


class Pool:
    """A pool of one process, this one: what it runs and returns is pickled."""

    def __init__(self, num_processes: int, mp_context: Any, initializer: Callable[[], None]):
        assert mp_context.get_start_method() == "spawn"
        initializer()

    def submit(self, function: Any, *arguments: Any) -> Any:
        function, arguments = pickle.loads(pickle.dumps((function, arguments)))
        result = pickle.dumps(function(*arguments))
        return type("Future", (), {"result": lambda self: pickle.loads(result)})()

    def shutdown(self, **_: bool) -> None:
        pass


def test_predictions_for_a_gpu_run_in_processes_that_do_not_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(memory_prediction, "ProcessPoolExecutor", Pool)
    ahead = predictions([RECIPE], torch.device("cuda"), predict_memory)
    with ahead as predict_one, predictions([], CPU, predict_memory) as here:
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
        assert predict_one(RECIPE) == here(RECIPE)


def test_snapshots_need_cuda(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="CUDA"):
        run("memory", device="cpu", folder=tmp_path)
    assert memory.snapshot_name({**POINT, "context": 128}, WHOLE_STEP) == ""
    assert memory.snapshot_name(POINT, WHOLE_STEP) == "memory-tiny-llama-demo-fp32-64-whole-step.pickle"


def test_a_point_starts_with_workspaces_freed_before_their_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    free_workspaces = "_cuda_clearCublasWorkspaces"
    monkeypatch.setattr(torch._C, free_workspaces, lambda: done.append("workspaces"), raising=False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("segments"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: done.append("count") or 7)
    assert memory_measure.start_afresh(tiny_bench(device=torch.device("cuda"))) == 7
    assert done == ["workspaces", "segments", "count"]
