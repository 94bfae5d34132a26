"""Function calls of predictions and plans, and (loosely) seconds and memory of the whole command."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import counted_calls
from counted_calls import within
from tiny_recipe import tiny_recipe
from trainfit.planning.recompute.solver import plan
from trainfit.prediction.predict import predict
from trainfit.spec.recipe import Batch
from trainfit.spec.recompute import BudgetGib, Layers
from trainfit.spec.units import GIB

RECIPE = (
    "model: {config: llama-3.1-8b}\nbatch: {micro: 1, seq: 4096}\nprecision: bf16\nhardware: {gpu: h200}\n"
)
COLD_S, WARM_S = 25.0, 2.0
"""Of processor time. Undisturbed a cold prediction takes 5.3 to 5.9 s and a later one 0.3 to 0.5
(docs/guide/predict.md)."""
WAITED_S, SHARE = 20.0, 15
"""Seconds that it may wait, and how many processes may share the core: no network is waited for."""

PROGRAM = """
import os, socket
socket.socket.connect = lambda *_: os._exit(99)  # A prediction needs no network.
from trainfit.cli.main import main
main()
"""
# A child starts as a copy of its parent, whose memory then counts as its own: so a small process starts and
# watches it.
WATCH = """
import json, os, subprocess, sys, time
start = time.monotonic()
with open(sys.argv[1], "wb") as out:
    process = subprocess.Popen(sys.argv[2:], stdout=out)
    _, status, used = os.wait4(process.pid, 0)
process.returncode = os.waitstatus_to_exitcode(status)
print(json.dumps([process.returncode, time.monotonic() - start, used.ru_utime + used.ru_stime, used.ru_maxrss
* 1024]))
"""


class Run(NamedTuple):
    wall_s: float
    cpu_s: float
    peak_rss_bytes: int
    printed: str


def run(recipe: Path) -> Run:
    """``trainfit predict`` in a process of its own, with a cache in the recipe's folder."""
    environment = os.environ | {"TRAINFIT_CACHE": str(recipe.parent / "ledgers")}
    printed = recipe.parent / "printed.txt"
    command = [sys.executable, "-c", PROGRAM, "predict", str(recipe), "--json"]
    watcher = [sys.executable, "-c", WATCH, str(printed), *command]
    done = subprocess.run(watcher, capture_output=True, text=True, check=True, env=environment)
    code, wall_s, cpu_s, peak_rss_bytes = json.loads(done.stdout)
    assert code == 0, done.stderr
    return Run(wall_s, cpu_s, peak_rss_bytes, printed.read_text())


@pytest.mark.slow
def test_seconds_and_memory_of_the_command(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    first, later = run(recipe), run(recipe)
    assert json.loads(first.printed)["params"] == 8_030_261_248
    assert within(first.cpu_s, COLD_S)
    assert within(later.cpu_s, WARM_S)
    assert first.wall_s < WAITED_S + SHARE * first.cpu_s
    assert first.peak_rss_bytes < 2 * GIB
    assert later.peak_rss_bytes < first.peak_rss_bytes / 2  # torch is not even imported
    assert later.printed == first.printed


@pytest.mark.parametrize(("implementation", "most_calls"), [("hf", 1_950_000), ("native", 1_400_000)])
def test_layers_cost_little(implementation: str, most_calls: int) -> None:
    """20 layers: 1.7 and 1.2 million calls with torch 2.13; each further one costs 19,000 and 12,000."""
    predict(tiny_recipe(implementation), use_cache=False)  # Imports are not the prediction's.
    recipe = tiny_recipe(implementation, 20)
    traced, calls = counted_calls.of(lambda: predict(recipe, use_cache=False))
    cached, cached_calls = counted_calls.of(predict, recipe)
    assert calls < most_calls
    assert cached_calls < 450_000  # The steady step is replayed twice at least.
    assert cached == traced


def test_a_plan_for_a_budget_costs_little() -> None:
    """16 layers: 3.1 million calls with torch 2.13."""
    recipe = tiny_recipe("native", 16, precision="bf16", batch=Batch(micro=2, seq=64))
    peaks = [
        predict(recipe.model_copy(update={"recompute": level})).peak_allocated_bytes
        for level in ("none", "full")
    ]
    budget = BudgetGib(budget_gib=sum(peaks) / 2 / GIB)
    found, calls = counted_calls.of(plan, recipe.model_copy(update={"recompute": budget}))
    assert isinstance(found.recipe.recompute, Layers)
    assert calls < 3_600_000
