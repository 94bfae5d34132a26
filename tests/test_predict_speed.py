"""How long the whole command takes, interpreter start included, and the memory it needs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from trainfit.spec.units import GIB

RECIPE = (
    "model: {config: llama-3.1-8b}\nbatch: {micro: 1, seq: 4096}\nprecision: bf16\nhardware: {gpu: h200}\n"
)
COLD_S, WARM_S = 8.0, 2.0
"""On two cores, with other tests beside. Alone a cold prediction takes 5.3 to 5.9 s (docs/predict.md)."""
TRIES = 3
"""A machine may be a third slower for minutes (neighbours, clocks); what is slow by itself is slow each time."""


class Run(NamedTuple):
    wall_s: float
    cpu_s: float
    peak_rss_bytes: int
    printed: str


# A child starts as a copy of its maker, whose memory then counts as its own: so a small process makes and watches it.
WATCH = """
import json, os, subprocess, sys, time
start = time.monotonic()
with open(sys.argv[1], "wb") as out:
    process = subprocess.Popen(sys.argv[2:], stdout=out)
    _, status, used = os.wait4(process.pid, 0)
process.returncode = os.waitstatus_to_exitcode(status)
print(json.dumps([process.returncode, time.monotonic() - start, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024]))
"""


def command(recipe: Path, *options: str) -> Run:
    """``trainfit predict`` in a process of its own, with a cache beside the recipe."""
    program = "from trainfit.cli.main import main; main()"
    environment = os.environ | {"TRAINFIT_CACHE": str(recipe.parent / "ledgers")}
    printed = recipe.parent / "printed.txt"
    watched = [sys.executable, "-c", program, "predict", str(recipe), "--json", *options]
    watcher = [sys.executable, "-c", WATCH, str(printed), *watched]
    run = subprocess.run(watcher, capture_output=True, text=True, check=True, env=environment)
    code, wall_s, cpu_s, peak_rss_bytes = json.loads(run.stdout)
    assert code == 0, run.stderr
    return Run(wall_s, cpu_s, peak_rss_bytes, printed.read_text())


def seconds(run: Run) -> float:
    """Time on the clock if the machine had nothing else to do, else processor time: tests run beside each other."""
    waited = run.wall_s > 1.3 * run.cpu_s + 0.2
    return run.cpu_s if waited else run.wall_s


def cold(folders: pytest.TempPathFactory, *options: str) -> tuple[Path, Run]:
    """A recipe, and a first prediction of it, which also fills the cache beside it: the first of TRIES soon enough."""

    def anew() -> tuple[Path, Run]:
        path = folders.mktemp("speed") / "recipe.yaml"
        path.write_text(RECIPE)
        return path, command(path, *options)

    tried = (anew() for _ in range(TRIES))
    return next(((path, run) for path, run in tried if seconds(run) < COLD_S), None) or anew()


def warm(recipe: Path, *options: str) -> Run:
    """A later prediction: the first of TRIES soon enough."""
    tried = (command(recipe, *options) for _ in range(TRIES))
    return next((run for run in tried if seconds(run) < WARM_S), None) or command(recipe, *options)


@pytest.fixture(scope="module")
def cold_8b(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    return cold(tmp_path_factory)


@pytest.mark.slow
def test_8b_cold_and_warm(cold_8b: tuple[Path, Run]) -> None:
    recipe, first = cold_8b
    later = warm(recipe)
    assert seconds(first) < COLD_S
    assert seconds(later) < WARM_S
    assert first.peak_rss_bytes < 2 * GIB
    assert later.peak_rss_bytes < first.peak_rss_bytes / 2  # torch is not even imported
    assert later.printed == first.printed
    assert json.loads(first.printed)["params"] == 8_030_261_248


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "params"), [("llama-3.1-70b", 70_553_706_496), ("llama-3.1-405b", 405_853_388_800)]
)
def test_larger_models_cost_what_8b_does(
    name: str, params: int, cold_8b: tuple[Path, Run], tmp_path_factory: pytest.TempPathFactory
) -> None:
    setting = ("--set", f"model.config={name}")
    recipe, large = cold(tmp_path_factory, *setting)
    later = warm(recipe, *setting)
    assert json.loads(large.printed)["params"] == params
    assert large.cpu_s < 1.5 * cold_8b[1].cpu_s
    assert seconds(large) < COLD_S
    assert large.peak_rss_bytes < 2 * GIB
    assert seconds(later) < WARM_S
    assert later.peak_rss_bytes < large.peak_rss_bytes / 2  # from the cache
