"""Measurements of a tiny model on this machine's CPU, and what becomes of trials that end badly."""

import gc
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from ended_processes import is_dead
from trainfit.measurement import process
from trainfit.measurement.environment import host_environment
from trainfit.measurement.meter import CpuMeter, is_out_of_memory
from trainfit.measurement.nvml import visible_device
from trainfit.measurement.run import measure, with_utilisation
from trainfit.measurement.trial import compiled_before
from trainfit.measurement.trial_files import RESULT, TrialRequest
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.parse import parse
from trainfit.spec.provenance import release
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Measurement
from trainfit.spec.units import MIB
from trainfit.step import assemble
from trial_start import forked

TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
    "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip


def recipe(**fields: object) -> Recipe:
    base = {"model": {"config": TINY}, "batch": {"micro": 2, "seq": 64, "accumulate": 2}, "precision": "fp32"}
    return parse(Recipe, base | fields)


@pytest.fixture(scope="module")
def measured() -> Measurement:
    """Result of a new interpreter, whose own modules take some 150 MiB; the model and its steps take 13."""
    limit = 48 * MIB
    return measure(recipe(), steps=4, warmup=0, device="cpu", memory_limit_bytes=limit, timeout_s=200)


def in_copy(**options: object) -> Measurement:
    """A measurement of one step, in a fork of this process."""
    how = {"recipe": recipe(), "steps": 1, "device": "cpu", "start": forked, "timeout_s": 200}
    return measure(**how | options)  # type: ignore[arg-type]


def test_losses_are_those_of_the_same_step_run_here(measured: Measurement):
    step = assemble(recipe(), torch.device("cpu"))
    batches = step.random_batches(recipe().seed)
    here = [step(batches).item() for _ in range(6)]
    assert measured.losses == pytest.approx(here, rel=1e-5)
    assert measured.losses[0] == pytest.approx(6.238, abs=0.1)  # ln 512, what an untrained model must lose


def test_memory_equals_closed_forms(measured: Measurement):
    hidden, ff, layers, vocabulary, kv = 128, 256, 3, 512, 64
    layer = hidden * (2 * hidden + 2 * kv) + 3 * hidden * ff + 2 * hidden
    params = 2 * vocabulary * hidden + layers * layer + hidden
    assert measured.params == measured.trainable_params == params
    assert measured.phases is not None
    assert measured.breakdown is not None
    assert measured.breakdown.gradients == 4 * params  # every tensor here is a multiple of 512 B
    num_tensors = 2 + layers * 9 + 1
    assert (
        measured.breakdown.optimizer == 8 * params + 512 * num_tensors
    )  # two moments, and a step count each
    assert measured.breakdown.weights - 4 * params in (512, 1024)  # the rotary frequencies, once or twice
    assert measured.phases.steady.peak == measured.breakdown.total == measured.peak_allocated_bytes
    grown = measured.phases.steady.forward - measured.phases.first.forward
    assert grown == measured.breakdown.optimizer  # the first step starts without optimizer state
    assert measured.phases.after_init == measured.breakdown.weights


def test_times_have_samples_and_what_the_trial_imports_is_not_of_its_limit(measured: Measurement):
    assert measured.status == "done", measured.message
    assert measured.step_times is not None
    assert len(measured.step_times.samples) == 4
    assert measured.first_step_s is not None
    assert measured.first_step_s > min(measured.step_times.samples)  # It allocates the optimizer's state.
    assert measured.step_s == measured.step_times.median
    assert measured.tokens_per_s == pytest.approx(2 * 64 * 2 / measured.step_times.median)
    assert release(measured.environment.torch) == release(torch.__version__)


def test_steps_of_minutes_are_run_as_seldom_as_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """As on CUDA, where reading peaks costs nothing: the steady step is timed, none more for a breakdown."""
    monkeypatch.setattr("trainfit.measurement.meter.CpuMeter.reads_at_no_cost", True)
    monkeypatch.setattr("trainfit.measurement.meter.CpuMeter.take", lambda _: (MIB, None))
    monkeypatch.setattr("trainfit.measurement.trial.LONG_STEP_S", 0.0)
    for steps in (1, 3):
        few = in_copy(steps=steps, warmup=1)
        assert few.status == "done", few.message
        assert few.step_times is not None
        assert (len(few.step_times.samples), len(few.losses)) == (steps, steps + 1)
        assert few.phases is not None
        assert few.message.startswith("no breakdown: the extra step for it would take ")
    times = CpuMeter.times

    def noted(self: CpuMeter, run: Any, num_steps: int, *, continues: bool = False) -> Any:
        with (tmp_path / "continues").open("a") as file:
            file.write(f"{continues} ")
        return times(self, run, num_steps)

    monkeypatch.setattr(CpuMeter, "times", noted)
    in_copy(steps=2, warmup=3)
    # Of three long steps the last is the first that is timed.
    assert (tmp_path / "continues").read_text().split() == ["False", "False", "False", "True"]
    monkeypatch.setattr("trainfit.measurement.trial.LONG_STEP_S", 60.0)
    assert len(in_copy(steps=1, warmup=1).losses) == 3


def test_out_of_memory_is_a_result_with_the_peak_reached():
    limit = 300 * MIB
    result = in_copy(recipe=recipe(batch={"micro": 512, "seq": 256}), memory_limit_bytes=limit)
    assert result.status == "out-of-memory"
    assert "step 1, forward" in result.message
    assert 64 * MIB < (result.peak_allocated_bytes or 0) <= limit


def test_a_memory_error_of_python_has_no_message_of_its_own(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("trainfit.step.assemble", fail)
    result = in_copy()
    assert result.status == "out-of-memory"
    assert result.message == "out of memory while the model and optimizer were built: no memory left"


def test_bad_input_comes_through_as_itself():
    two = recipe(hardware={"gpu": "cpu", "count": 2})
    with pytest.raises(InputError, match=r"hardware\.count"):
        in_copy(recipe=two)
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="use device cpu"):
            in_copy(device="cuda")


def test_killed_trial_keeps_what_it_knew():
    def start_and_kill(folder: Path) -> int:
        pid = forked(folder)

        def kill() -> None:
            while not (folder / RESULT).is_file() or "step 1" not in (folder / RESULT).read_text():
                time.sleep(0.01)
            os.kill(pid, signal.SIGKILL)

        threading.Thread(target=kill, daemon=True).start()
        return pid

    big = recipe(batch={"micro": 64, "seq": 256})
    result = in_copy(recipe=big, steps=1000, start=start_and_kill)
    assert result.status == "crashed"
    assert "signal 9" in result.message
    assert result.params > 0
    assert (result.peak_allocated_bytes or 0) >= 4 * result.params


def run_shell(script: str, folder: Path, timeout_s: float) -> Measurement:
    """Run a shell script as the trial of ``folder``."""

    def start(folder: Path) -> int:
        with open(folder / process.LOG, "wb") as log:
            started = subprocess.Popen(
                ["sh", "-c", script], stdout=log, stderr=log, start_new_session=True, cwd=folder
            )
        started.returncode = 0
        return started.pid

    environment = host_environment("cpu")
    request = TrialRequest(recipe=recipe(), steps=1, warmup=0, device="cpu", environment=environment)
    return process.run_in(folder, request, start, timeout_s)[0]


def test_time_limit_ends_grandchildren_too(tmp_path: Path):
    result = run_shell("sleep 3000 & echo $! > pid; wait; touch waited", tmp_path, 1.0)
    assert result.status == "timeout"
    assert not (tmp_path / "waited").exists()
    assert "after 1 s" in result.message
    assert is_dead(int((tmp_path / "pid").read_text()))


def test_crash_keeps_the_last_lines(tmp_path: Path):
    result = run_shell("echo line one >&2; echo the reason >&2; exit 3", tmp_path, 60.0)
    assert result.status == "crashed"
    assert "exit code 3" in result.message
    assert result.message.endswith("the reason")


def test_a_copys_collections_pass_over_what_its_maker_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = (
        "import gc\ndef main(folder):\n"
        "    (folder / 'n').write_text(str(gc.get_freeze_count()))\n    return 0\n"
    )
    before = gc.get_freeze_count()
    (tmp_path / "counts_frozen.py").write_text(program)
    monkeypatch.syspath_prepend(tmp_path)
    ending = process.run_to_end(tmp_path, lambda folder: process.forked(folder, "counts_frozen"), 60.0)
    assert ending.exit_code == 0
    assert int((tmp_path / "n").read_text()) > 0.9 * len(gc.get_objects())
    assert gc.get_freeze_count() == before


def test_utilisation(measured: Measurement):
    timed = measured.model_copy(update={"step_s": 2.0})
    # 45 % MFU with full recomputation (4/3 of the FLOPs) reads as 60 % HFU.
    known = with_utilisation(timed, 0.9e12, 1.2e12, 1e12)
    assert (known.mfu, known.hfu) == (pytest.approx(0.45), pytest.approx(0.60))
    assert with_utilisation(timed, 1e12, None, None).mfu is None


def test_visible_device(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-aa")
    assert (visible_device(0), visible_device(1)) == (3, "GPU-aa")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible_device(2) == 2


def test_what_counts_as_out_of_memory():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))


@pytest.mark.gpu
def test_gpu_measurement_agrees_with_itself():
    result = measure(recipe(batch={"micro": 8, "seq": 256}), steps=3, warmup=0, device="cuda", timeout_s=200)
    assert result.status == "done", result.message
    assert result.phases is not None
    assert result.breakdown is not None
    assert result.phases.steady.peak == result.peak_allocated_bytes
    assert result.breakdown.total == pytest.approx(result.phases.steady.peak, rel=0.01)
    # A tiny model peaks where the backward begins: no gradient is there yet, AdamW's two moments are.
    assert result.breakdown.optimizer >= 8 * result.params
    sizes = [result.peak_allocated_bytes, result.peak_reserved_bytes, result.peak_device_bytes]
    assert sizes == sorted(size or 0 for size in sizes)
    assert result.losses[-1] < result.losses[0]
    large = recipe(batch={"micro": 512, "seq": 256})
    small = measure(large, steps=1, device="cuda", memory_limit_bytes=300 * MIB)
    assert small.status == "out-of-memory"
    assert 0 < (small.peak_allocated_bytes or 0) <= 300 * MIB


def test_programs_of_an_earlier_process(monkeypatch: pytest.MonkeyPatch):
    """Counted by torch: a program that occurs twice in this process is missed once, then found."""
    for hits, misses in ((2, 0), (0, 2), (1, 1), (0, 0)):
        found = Counter(fxgraph_cache_hit=hits, fxgraph_cache_miss=misses)
        monkeypatch.setitem(torch._dynamo.utils.counters, "inductor", found)
        assert compiled_before() is (hits > 0 and misses == 0)
