"""Function calls, memory and (loosely) seconds of the whole command, interpreter start included."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import counted_calls
from machine_speed import slowness
from trainfit.spec.units import GIB

RECIPE = (
    "model: {config: llama-3.1-8b}\nbatch: {micro: 1, seq: 4096}\nprecision: bf16\nhardware: {gpu: h200}\n"
)
COLD_S, WARM_S = 25.0, 2.0
"""Of processor time.

Undisturbed a cold prediction takes 5.3 to 5.9 s and a later one 0.3 to 0.5 (docs/guide/predict.md).
"""
WAITED_S = 20.0
"""On the clock beyond the processor time: other tests run beside this one, but no network is waited for."""


class Size(NamedTuple):
    params: int
    cold_calls: int
    warm_calls: int


SIZES = {
    "llama-3.1-8b": Size(8_030_261_248, 10_000_000, 1_000_000),
    "llama-3.1-70b": Size(70_553_706_496, 11_500_000, 1_500_000),
    "llama-3.1-405b": Size(405_853_388_800, 13_000_000, 2_000_000),
}
"""Most calls, a fifth above the count: 8.5, 9.7 and 11.0 million cold; 0.8, 1.3 and 1.7 warm (torch 2.13)."""

PROGRAM = "from trainfit.cli.main import main; main()"
# A child starts as a copy of its maker, whose memory then counts as its own: so a small process makes and
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


def run(program: list[str], recipe: Path, *options: str) -> Run:
    """``trainfit predict`` in a process of its own, with a cache beside the recipe."""
    environment = os.environ | {"TRAINFIT_CACHE": str(recipe.parent / "ledgers")}
    printed = recipe.parent / "printed.txt"
    watched = [*program, "predict", str(recipe), "--json", *options]
    watcher = [sys.executable, "-c", WATCH, str(printed), *watched]
    done = subprocess.run(watcher, capture_output=True, text=True, check=True, env=environment)
    code, wall_s, cpu_s, peak_rss_bytes = json.loads(done.stdout)
    assert code == 0, done.stderr
    return Run(wall_s, cpu_s, peak_rss_bytes, printed.read_text())


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


@pytest.mark.slow
def test_seconds_and_memory(recipe: Path) -> None:
    first, later = (run([sys.executable, "-c", PROGRAM], recipe) for _ in range(2))
    assert first.cpu_s < COLD_S * slowness()
    assert later.cpu_s < WARM_S * slowness()
    assert first.wall_s - first.cpu_s < WAITED_S * slowness()
    assert first.peak_rss_bytes < 2 * GIB
    assert later.peak_rss_bytes < first.peak_rss_bytes / 2  # torch is not even imported
    assert later.printed == first.printed


@pytest.mark.slow
@pytest.mark.parametrize("model", SIZES)
def test_larger_models_cost_little_more(model: str, recipe: Path) -> None:
    size, count = SIZES[model], recipe.parent / "calls.txt"
    runs: list[Run] = []
    for most in (size.cold_calls, size.warm_calls):  # The later one comes from the cache.
        runs.append(run(counted_calls.command(PROGRAM, count), recipe, "--set", f"model.config={model}"))
        assert int(count.read_text()) < most
    first, later = runs
    assert json.loads(first.printed)["params"] == size.params
    assert first.peak_rss_bytes < 2 * GIB
    assert later.peak_rss_bytes < first.peak_rss_bytes / 2
    assert later.printed == first.printed
