"""When a process can fork: not after autograd has started threads, without which a fork cannot train."""

import ctypes
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from trainfit.bench.harness import processes
from trainfit.measurement.fork_server import ready_to_fork
from trainfit.measurement.process import forked, spawned
from trainfit.virtual import own_process
from trainfit.virtual.compile.forked import can_fork

PR_SET_NAME = 15  # linux/prctl.h
linux = pytest.mark.skipif(sys.platform != "linux", reason="no process is forked elsewhere")

AFTER_A_TRACE = """
import os, torch
from trainfit.spec.recipe import Recipe
from trainfit.prediction.trace import trace
from trainfit.virtual.own_process import autograd_has_threads
config = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64, "max_position_embeddings": 64}
trace(Recipe.model_validate({"model": {"config": config}, "batch": {"micro": 1, "seq": 16}}))
torch.ones(1, requires_grad=True).sum().backward()
assert not autograd_has_threads()
child = os.fork()
if child == 0:
    torch.ones(1, requires_grad=True).sum().backward()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0, "a fork cannot run a backward"
"""


@linux
def test_a_fork_can_train_after_a_trace_and_a_backward() -> None:
    """In a CUDA build that sees no GPU, PyTorch's own fake tensors start eight threads of autograd."""
    done = subprocess.run([sys.executable, "-c", AFTER_A_TRACE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@linux
def test_nothing_forks_beside_threads_of_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with GPUs after the first backward."""
    running, end = threading.Event(), threading.Event()

    def thread_of_autograd() -> None:
        ctypes.CDLL(None).prctl(PR_SET_NAME, b"pt_autograd_0", 0, 0, 0)
        running.set()
        end.wait()

    thread = threading.Thread(target=thread_of_autograd, daemon=True)
    monkeypatch.setattr(own_process, "is_own_process", True)
    monkeypatch.setattr(own_process, "has_threads", lambda: False)
    assert not own_process.autograd_has_threads()
    assert ready_to_fork("cpu") is forked
    thread.start()
    running.wait()
    try:
        assert own_process.autograd_has_threads()
        assert ready_to_fork("cpu") is spawned
        assert not can_fork()
        with processes.Ranks(1, "cpu", rank_trains) as ranks:
            assert ranks.results() == [1.0]
            assert ranks._processes[0]._start_method == "spawn"
    finally:
        end.set()
        thread.join()


def rank_trains(rank: processes.Rank) -> Iterator[float]:
    x = torch.ones(1, requires_grad=True)
    x.sum().backward()
    assert x.grad is not None
    yield x.grad.item()


@linux
@pytest.mark.gpu
def test_a_backward_beside_a_gpu_starts_threads_that_are_seen() -> None:
    torch.ones(1, requires_grad=True, device="cuda").sum().backward()
    assert own_process.autograd_has_threads()
    assert ready_to_fork("cpu") is spawned
