"""The training loop: learning, metrics, signals, and the message at the end."""

import io
import json
import math
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from rich.console import Console

import trainfit
from tiny_training import LLAMA, Listener, options_for, stop_at, tiny
from trainfit.measurement.feed import Feed
from trainfit.prediction.predict import predict
from trainfit.report.results import show_training
from trainfit.spec.errors import InputError
from trainfit.training import session
from trainfit.training.log import LOG, JsonlLog, TensorBoard
from trainfit.training.loop import _deterministic, train
from trainfit.training.observer import StepFlops, StepMetrics
from trainfit.training.options import SyntheticData
from trainfit.training.progress import ProgressBar, step_line
from trainfit.training.synthetic import synthetic_text


def test_it_learns_and_no_model_beats_the_entropy_of_unseen_documents(tmp_path):
    options = options_for(tmp_path, 60, eval_every=30, data=SyntheticData(num_documents=400))
    listener = Listener()
    summary = train(tiny("batch.micro=8", "optimizer.lr=5e-3"), options, observers=[listener])
    assert summary.losses[0] == pytest.approx(math.log(384), rel=0.05), "a random model knows nothing"
    assert summary.final_loss < 0.75 * summary.losses[0]
    assert summary.evaluations[1].perplexity < summary.evaluations[0].perplexity
    # Both sides have about equal text per token, so the bits per token of all documents are the floor.
    bits = sum(synthetic_text(0, index).bits for index in range(400))
    tokens = listener.run.train_tokens + listener.run.eval_tokens
    assert summary.eval_perplexity > 2 ** (bits / tokens)
    assert summary.eval_perplexity == pytest.approx(math.exp(summary.evaluations[-1].loss))


FLOPS = StepFlops(model_flops=6e9, hardware_flops=8e9, peak_flops_per_s=1e12)


def test_observers_are_called_in_order_with_every_metric(tmp_path):
    listener = Listener()
    options = options_for(tmp_path, 5, eval_every=2, save_every=3)
    summary = train(tiny(), options, flops=FLOPS, observers=[listener, TensorBoard()])
    assert listener.events == ["start", 1, 2, "eval", 3, "saved", 4, "eval", 5, "eval", "saved", "end"]
    assert listener.closed == 1
    last = listener.steps[-1]
    assert last.mfu == pytest.approx(6e9 / last.step_s / 1e12)
    assert last.hfu == pytest.approx(last.mfu * 8 / 6)
    assert last.tokens_per_s == pytest.approx(4 * 32 / last.step_s)
    assert last.busy is not None
    assert last.gradient_norm is None
    assert summary.mfu == pytest.approx(6e9 / summary.step_s / 1e12)
    assert summary.checkpoint == str(tmp_path / "checkpoints" / "step-00000005")
    assert json.loads(json.dumps(summary.content(), allow_nan=False))["run"]["params"] == summary.run.params
    assert list((tmp_path / "tensorboard").glob("events*"))
    # On a CPU the peak is that of the live tensors of the second step: weights, gradients and two moments in
    # fp32 are alive together; activations are on top.
    assert [metrics.peak_memory_bytes is None for metrics in listener.steps] == [True] + 4 * [False]
    assert summary.peak_memory_is == "live-tensors"
    state_bytes, logits_bytes = 16 * summary.run.params, 4 * 32 * 384 * 4
    assert state_bytes < summary.peak_memory_bytes < state_bytes + 20 * logits_bytes


def test_live_mfu_is_that_of_the_predicted_flops(tmp_path):
    """With a window, model FLOPs are of visible pairs only; eager attention executes all of them."""
    config = {**LLAMA, "model_type": "mistral", "sliding_window": 8}
    recipe, listener = tiny("attention=eager", "recompute=full", config=config), Listener()
    trainfit.train(
        recipe, out=tmp_path, steps=2, data="stories:60", device="cpu", peak_flops=1e12, tensorboard=False,
        observers=[listener],
    )  # fmt: skip
    estimate = predict(recipe)
    assert len(listener.steps) == 2
    for metrics in listener.steps:
        assert metrics.mfu == pytest.approx(estimate.model_flops / metrics.step_s / 1e12)
        assert metrics.hfu == pytest.approx(estimate.hardware_flops / metrics.step_s / 1e12)
        assert metrics.hfu > 1.2 * metrics.mfu


def test_a_loss_that_is_no_number_ends_the_run_and_keeps_the_last_good_checkpoint(tmp_path):
    # This rate overflows fp32 weights in a few steps.
    recipe = tiny("optimizer.name=sgd", "optimizer.lr=1e30", "optimizer.weight_decay=0")
    summary = train(recipe, options_for(tmp_path, 50, save_every=1, keep=100, eval_fraction=0.0))
    assert (summary.status, summary.exit_code) == ("diverged", 65)
    assert "not finite" in summary.message or "loss is" in summary.message
    assert "optimizer.lr" in summary.message
    assert all(math.isfinite(loss) for loss in summary.losses)
    assert len(list((tmp_path / "checkpoints").iterdir())) <= summary.steps < 50


def test_a_signal_ends_after_the_step_and_its_handler_is_restored(tmp_path):
    number = signal.SIGINT
    before, console = signal.getsignal(number), Console(file=io.StringIO(), width=200)
    listener = Listener(stop_at(2, number))
    train(tiny(), options_for(tmp_path, 500), observers=[listener, ProgressBar(console)])
    assert listener.events == ["start", 1, 2, "saved", "end"]
    ended = "stopped: SIGINT after step 2 of 500; --resume goes on from it"
    assert ended in console.file.getvalue()
    assert signal.getsignal(number) is before


def test_outside_the_main_thread_it_trains_without_signals(tmp_path):
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(train, tiny(), options_for(tmp_path, 2)).result().status == "done"


def test_out_of_memory_is_a_result(tmp_path, monkeypatch):
    def no_memory(metrics: StepMetrics) -> None:
        if metrics.step == 3:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes.")

    summary = train(tiny(), options_for(tmp_path, 5, save_every=2), observers=[Listener(no_memory)])
    assert (summary.status, summary.exit_code) == ("out-of-memory", 65)
    assert "can't allocate" in summary.message
    assert "step-00000002" in summary.message


def test_an_error_of_an_observer_ends_the_run_and_closes_all(tmp_path):
    def full(metrics: StepMetrics) -> None:
        raise OSError(28, "No space left on device")

    listeners = [Listener(full), Listener()]
    with pytest.raises(OSError, match="No space"):
        train(tiny(), options_for(tmp_path, 5), observers=listeners)
    assert [listener.closed for listener in listeners] == [1, 1]


def test_the_norm_before_clipping_is_reported(tmp_path):
    listener = Listener()
    recipe = tiny("optimizer.name=sgd", "optimizer.lr=1.0", "optimizer.clip_norm=1e-6")
    train(recipe, options_for(tmp_path, 2), observers=[listener])
    assert all(metrics.gradient_norm > 1e-3 for metrics in listener.steps)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_missing_device_is_refused(tmp_path):
    with pytest.raises(InputError, match="no CUDA GPU"):
        train(tiny(), options_for(tmp_path, 2, device="cuda"))
    assert not (tmp_path / "run.json").exists()


def test_an_op_without_deterministic_kernel_is_refused_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    def refused_by_torch() -> None:
        with _deterministic(torch.device("cuda"), options_for(tmp_path, 1)):
            assert torch.are_deterministic_algorithms_enabled()
            raise RuntimeError(
                "cumsum_cuda_kernel does not have a deterministic implementation, but you set it. More."
            )

    with pytest.raises(InputError, match=r"cumsum_cuda_kernel.*set deterministic to false"):
        refused_by_torch()
    assert not torch.are_deterministic_algorithms_enabled()
    with _deterministic(torch.device("cuda"), options_for(tmp_path, 1, deterministic=False)):
        assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("terminal", [True, False])
def test_the_progress_bar_shows_every_metric(tmp_path, terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=200)
    summary = train(tiny(), options_for(tmp_path, 3), flops=FLOPS, observers=[ProgressBar(console)])
    shown = console.file.getvalue()
    for part in ("tokens/s", "MFU", "HFU", "peak", "CPU", "busy", "3/3", "perplexity"):
        assert part in shown
    assert f"loss {summary.final_loss:.4f}" in shown
    unknown = StepMetrics(step=1, loss=2.0, learning_rate=1e-4, epoch=0.1, step_s=0.5, tokens_per_s=2e6)
    assert step_line(unknown, "GPU") == "loss 2.0000  2.00M tokens/s"
    waiting = unknown.model_copy(update={"data_wait_s": 0.125})
    assert step_line(waiting, "GPU") == "loss 2.0000  2.00M tokens/s  waits for data 25%"
    assert "data" not in step_line(unknown.model_copy(update={"data_wait_s": 0.001}), "GPU")


def test_the_wait_for_data_is_named_by_the_meter_the_log_and_the_result(tmp_path, monkeypatch):
    read, delay_s = session.step_sequences, 0.05

    def slow(*arguments, **options):
        time.sleep(delay_s)
        return read(*arguments, **options)

    monkeypatch.setattr(session, "step_sequences", slow)
    listener, out = Listener(), io.StringIO()
    summary = train(tiny(), options_for(tmp_path, 4), observers=[listener, TensorBoard(), JsonlLog()])
    waits = [one.data_wait_s for one in listener.steps]
    assert all(delay_s <= wait < one.step_s for wait, one in zip(waits[:-1], listener.steps, strict=False))
    assert waits[-1] < delay_s, "no batch follows the last step"
    logged = [json.loads(line) for line in (tmp_path / LOG).read_text().splitlines()]
    assert [line["data_wait_s"] for line in logged if line["kind"] == "step"] == waits
    # Not the first step, nor the second, whose live tensors are counted.
    steps = listener.steps[2:]
    assert summary.data_wait_share == pytest.approx(sum(waits[2:]) / sum(one.step_s for one in steps))
    show_training(tiny(), summary, out=Console(file=out, width=200))
    assert "of that time the device waited for data: raise loader.workers" in out.getvalue()


def test_options_and_observers_need_no_torch():
    names = ("options", "observer", "log", "folder", "ranks.launch")
    modules = ", ".join(f"trainfit.training.{name}" for name in names)
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


@pytest.mark.gpu
def test_a_gpu_waits_for_data_only_where_it_has_no_work():
    """The host waits 50 ms for each batch; the GPU has work for longer before the second one."""

    def slow(step):
        time.sleep(0.05)
        return {"input_ids": torch.zeros(4, 32, dtype=torch.int64)}

    device = torch.device("cuda", 0)
    with Feed(tiny(), slow, device, range(2)) as feed:
        torch.cuda.synchronize()
        next(feed)
        torch.cuda.synchronize()
        assert 0.04 < feed.wait_s() < 0.2
        torch.cuda._sleep(1_000_000_000)  # About half a second.
        next(feed)
        torch.cuda.synchronize()
        assert feed.wait_s() < 0.01
