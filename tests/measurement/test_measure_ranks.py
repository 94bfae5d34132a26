"""Measurements of a recipe for several GPUs, on two processes of this machine's CPU."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ended_processes import is_dead
from tiny_recipe import tiny_recipe
from trainfit.measurement import ranks
from trainfit.measurement.environment import host_environment
from trainfit.measurement.fork_server import ready_to_fork
from trainfit.measurement.process import is_exiting
from trainfit.measurement.run import measure
from trainfit.measurement.trial_files import RESULT
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Batch, Hardware, Parallel
from trainfit.spec.result import Measurement, PhasePeaks, Phases, Spread
from trainfit.step import assemble
from trial_start import forked

TWO = tiny_recipe("native", hardware=Hardware(count=2), batch=Batch(micro=2, seq=16))


def measured(recipe: Any = TWO, **options: Any) -> Measurement:
    ready_to_fork("cpu")
    return measure(recipe, **{"steps": 2, "device": "cpu", "timeout_s": 60, "start": forked} | options)


def test_losses_are_those_of_one_process_on_the_whole_batch() -> None:
    found = measured(warmup=2)
    assert found.status == "done", found.message
    whole = tiny_recipe("native", hardware=Hardware(count=1), batch=Batch(micro=2, seq=16, accumulate=2))
    step = assemble(whole, torch.device("cpu"))
    batches = [step.random_batches(seed)[0] for seed in (0, 1)]  # Of ranks 0 and 1.
    assert found.losses == pytest.approx([step(batches).item() for _ in range(4)], rel=1e-6)
    assert found.step_s == max(rank.step_s or 0.0 for rank in found.ranks)
    assert found.tokens_per_s == pytest.approx(2 * 2 * 16 / (found.step_s or 0.0))
    assert len(found.ranks) == 2
    assert found.params == sum(parameter.numel() for parameter in step.model.parameters())


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raises() -> None:
    os.write(2, b"the reason")  # pytest has replaced sys.stderr.
    raise ValueError


def refuses() -> None:
    raise InputError("does not work here", "use another", field="precision", value="fp8")


def runs_out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


def end_rank(monkeypatch: pytest.MonkeyPatch, folder: Path, number: int, how: Callable[[], None]) -> None:
    """End rank ``number`` before its second step; both ranks note their process ids."""
    align = ranks.Rank.align

    def aligned(self: ranks.Rank, device: torch.device) -> None:
        (folder / os.environ["RANK"]).write_text(str(os.getpid()))
        align(self, device)
        if os.environ["RANK"] == str(number) and self._num_aligned == 2:
            how()

    monkeypatch.setattr(ranks.Rank, "align", aligned)
    monkeypatch.setattr(ranks, "GRACE_S", 0.3)


@pytest.mark.parametrize(
    ("number", "how", "status", "message"),
    [
        (1, killed, "crashed", "rank 1: ended in step 1, optimizer (signal 9)"),
        (0, raises, "crashed", "rank 0: ended in step 1, optimizer (exit code 1)"),
        (1, runs_out_of_memory, "out-of-memory", "rank 1: out of memory in step 1, optimizer: CUDA out of"),
    ],
)
def test_a_rank_that_ends_badly_is_named_and_ends_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int, how: Any, status: str, message: str
) -> None:
    end_rank(monkeypatch, tmp_path, number, how)
    start_s = time.monotonic()
    found = measured(steps=100_000)
    assert time.monotonic() - start_s < 30
    assert found.status == status
    assert found.message.startswith(message)
    assert found.message.endswith("the reason") == (how is raises)
    assert len(found.ranks) == 2
    assert all(is_dead(int((tmp_path / name).read_text())) for name in ("0", "1"))


def test_a_refusal_of_one_rank_is_raised_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    end_rank(monkeypatch, tmp_path, 1, refuses)
    with pytest.raises(InputError, match="precision = 'fp8': does not work here"):
        measured()


def test_a_recipe_for_more_gpus_than_there_are_is_refused() -> None:
    with pytest.raises(InputError, match=r"for 99 GPUs, and this process sees \d"):
        ranks._devices("cuda", 99)
    with pytest.raises(InputError, match="cuda:1 is one GPU"):
        ranks._devices("cuda:1", 2)


def test_memory_is_of_the_highest_rank_and_time_of_the_slowest() -> None:
    phase = PhasePeaks(forward=1, backward=2, optimizer=3)

    def of(peak: int, seconds: float, loss: float) -> Measurement:
        return Measurement(
            recipe_id="a", status="done", environment=host_environment("cuda"),
            phases=Phases(after_init=peak, first=phase, steady=phase), peak_allocated_bytes=peak,
            peak_device_bytes=100 - peak, step_s=seconds, step_times=Spread.of([seconds]), losses=(loss, 1.0),
        )  # fmt: skip

    recipe = tiny_recipe(hardware=Hardware(count=2), parallel=Parallel(replicate=2, strategy="ddp"))
    found = ranks.combined(recipe, [of(10, 3.0, 2.0), of(20, 2.0, 4.0)])
    assert (found["peak_allocated_bytes"], found["peak_device_bytes"], found["step_s"]) == (20, 80, 3.0)
    assert found["phases"].after_init == 20
    assert found["tokens_per_s"] == pytest.approx(2 * 2 * 16 / 3.0)
    assert found["losses"] == (3.0, 1.0)
    assert [rank.peak_allocated_bytes for rank in found["ranks"]] == [10, 20]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_have_peaks_of_their_own() -> None:
    found = measure(TWO, steps=2, warmup=2, device="cuda", timeout_s=100)
    assert found.status == "done", found.message
    for rank in found.ranks:
        assert rank.phases is not None
        assert rank.phases.peak <= (rank.peak_reserved_bytes or 0) < (rank.peak_device_bytes or 0)


def test_a_stopped_rank_ends_its_trial(tmp_path, monkeypatch) -> None:
    """The others wait for it: it is ended, with the reason."""
    process = subprocess.Popen(["sleep", "600"])
    begun = Measurement(
        recipe_id="", status="crashed", message="in step 3", environment=host_environment("cpu")
    )
    (tmp_path / RESULT).write_text(begun.model_dump_json())
    rank = ranks._Rank(0, tmp_path, process.pid, time.monotonic())
    process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(ranks, "STOPPED_S", 0.2)
    try:
        ranks._watch([rank], lambda: None)
    finally:
        process.kill()
    assert rank.code == -signal.SIGKILL
    assert rank.measurement.message == f"in step 3; process {process.pid} had been stopped for 0 s"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc on this system")
def test_a_rank_that_the_kernel_is_ending_was_last_seen_running_before(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        rank = ranks._Rank(0, tmp_path, process.pid, seen_s=0.0)
        rank.poll()
        seen_s = rank.seen_s
        assert seen_s > 0
        assert not is_exiting(process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert is_exiting(process.pid)
        rank.poll()
        assert (rank.code, rank.seen_s) == (-9, seen_s)
    assert not is_exiting(process.pid)
