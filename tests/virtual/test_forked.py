"""When a process can fork (not after autograd has started threads, without which a fork cannot train); what
code generated in forks is: the same."""

import ctypes
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

import trainfit
from tiny_recipe import TINY_LLAMA
from trainfit.bench.harness import processes
from trainfit.ledger.ledger import RepeatError
from trainfit.measurement.fork_server import ready_to_fork
from trainfit.measurement.process import forked, spawned
from trainfit.virtual import forked as forks

PR_SET_NAME = 15  # linux/prctl.h
linux = pytest.mark.skipif(sys.platform != "linux", reason="no process is forked elsewhere")

AFTER_A_TRACE = """
import os, torch
from trainfit.spec.recipe import Recipe
from trainfit.prediction.trace import trace
from trainfit.virtual.forked import autograd_has_threads
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

PLAIN = {"model_type": "trainfit", "position_embedding": "learned", "gated_mlp": False, "hidden_act": "relu"}
SMALL = {"model": {"config": TINY_LLAMA | PLAIN, "implementation": "native"}, "compile": "block"}
COMPILED = {"recipe": SMALL, "gpu": "h200", "seq": 32}
COMPILES_IN_FORKS = f"""
import json, os
import trainfit
from trainfit.virtual import forked
from trainfit.virtual.compile import generate
forked.allow()
os.sched_getaffinity = lambda pid: {{0, 1}}
forks, begin = [], generate.begin
def counted(function):
    forks.append(function)
    return begin(function)
generate.begin = counted
found = trainfit.predict(use_cache=False, **{COMPILED})
num_forks = len(forks)
generate._strides_of_lowered = lambda output: None
again = trainfit.predict(use_cache=False, **{COMPILED})
print(json.dumps([[one.model_dump(mode="json") for one in (found, again)], num_forks, len(forks)]))
"""


@linux
def test_code_generated_in_forks_is_the_same() -> None:
    """So it is where a forward lowered in a fork has other strides than its backward was lowered with."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILES_IN_FORKS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    estimates, *num_forks = json.loads(done.stdout)
    assert num_forks == [2, 6]  # Forward and backward, of one block; again twice where strides differ.
    expected = json.loads(json.dumps(trainfit.predict(use_cache=False, **COMPILED).model_dump(mode="json")))
    assert estimates == [expected, expected]


def test_a_process_that_is_not_a_command_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "has_threads", lambda: False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    assert not forks.can_fork()


@linux
def test_a_fork_returns_results_and_exceptions() -> None:
    assert forks.begin(lambda: [1, "two"])() == [1, "two"]
    with pytest.raises(RepeatError, match="not alike"):
        forks.begin(_refused)()
    with pytest.raises(RuntimeError, match="ended"):
        forks.begin(lambda: os._exit(1))()


def _refused() -> None:
    raise RepeatError("not alike")


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
    monkeypatch.setattr(forks, "_allowed", True)
    monkeypatch.setattr(forks, "has_threads", lambda: False)
    assert not forks.autograd_has_threads()
    assert ready_to_fork("cpu") is forked
    thread.start()
    running.wait()
    try:
        assert forks.autograd_has_threads()
        assert ready_to_fork("cpu") is spawned
        assert not forks.can_fork()
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
    assert forks.autograd_has_threads()
    assert ready_to_fork("cpu") is spawned
