"""The shipped scripts of reinforcement learning, traced and run."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import trainfit
from trainfit.spec.result import Estimate

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("RL_TINY", "1")
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def phases(found: Estimate) -> dict[str, int]:
    """Return the forwards of each phase besides the update."""
    assert found.code is not None
    assert found.code.scoring is not None
    return {one.name: one.num_forwards for one in (*found.code.other_phases, found.code.scoring)}


def test_the_phases_of_a_script_on_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    script = example("rl_one_gpu", monkeypatch)
    script.main()
    found = trainfit.trace(script.main, gpu="h100-sxm", steps=2)
    assert phases(found) == {"generation": script.NEW, "scoring": 1}
    assert "A policy's loop" in str(found)


def test_fsdp_gathers_the_weights_once_a_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    script = example("rl_fsdp", monkeypatch)
    found = trainfit.trace(script.main, gpu="h100-sxm", steps=2, world_size=2)
    assert phases(found) == {"generation": script.NEW, "scoring": 1}
    layers = script.SIZES["num_hidden_layers"]
    # Of a step: scoring and the update's forward gather each layer and the rest, the backward the layers but
    # the last, which is still there.
    gathers = {one.kind: one.calls for one in found.traffic}
    assert gathers["reduce_scatter"] == layers + 1
    assert gathers["all_gather"] == 2 * (layers + 1) + layers - 1


def test_the_script_runs_on_two_ranks() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run(
        [*command, str(EXAMPLES / "rl_fsdp.py")],
        env=os.environ | {"RL_TINY": "1", "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("on rank 0") == 3
