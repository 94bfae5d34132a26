"""Sweeps in processes: one trial a GPU; a dead worker costs a row; a stopped sweep leaves no process."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from command_worker import Worker
from tiny_sweep import BASE
from trainfit.spec.errors import InputError
from trainfit.sweeps import local
from trainfit.sweeps.journal import RECORDS


def test_one_trial_a_gpu_and_none_for_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5")
    both = local.LocalExecutor("auto")
    assert both.environments("measure", 7) == [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in ("3", "GPU-5")]
    assert local.LocalExecutor("auto", jobs=1).environments("measure", 7) == [{"CUDA_VISIBLE_DEVICES": "3"}]
    assert {one["CUDA_VISIBLE_DEVICES"] for one in both.environments("predict", 7)} == {""}
    with pytest.raises(InputError, match="use --jobs 2 or fewer"):
        local.LocalExecutor("auto", jobs=3)
    assert local.LocalExecutor("cpu").environments("measure", 7) == [{}]
    assert local.LocalExecutor("cpu", jobs=2).environments("measure", 7) == [{}, {}]


FORK = "import tiny_sweep, trainfit.sweeps.worker as worker; worker.start = tiny_sweep.forked_worker"


def descendants(pid: int) -> list[int]:
    """Return the running processes below ``pid``, from /proc, parents first."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields[0] != "Z":
            parents[int(stat.parent.name)] = int(fields[1])
    found, edge = [], {pid}
    while edge:
        edge = {child for child, parent in parents.items() if parent in edge}
        found += sorted(edge)
    return found


def wait_for(condition: Callable[[], Any], seconds: float = 600.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)
    return found


def measuring(sweep: int) -> list[int]:
    """Return the worker and its trial, once both run."""
    return wait_for(lambda: len(found := descendants(sweep)) == 2 and found)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_dead_worker_is_a_lost_row_and_a_stopped_or_killed_sweep_leaves_no_process(
    tmp_path: Path, worker: Worker
) -> None:
    path, out = tmp_path / "endless.yaml", tmp_path / "out"
    variants = "list: [{name: one}, {name: two, seed: 1}]\n"
    path.write_text(f"{BASE}{variants}measure: {{steps: 1000000}}\nlimits: {{seconds: 500}}\n")
    words = ("sweep", str(path), "--out", str(out), "--measure-only", "--json")

    def begin(pool: ThreadPoolExecutor) -> tuple[Any, int]:
        ending = pool.submit(worker.run, *words, seconds=500, memory_bytes=None, first=FORK)
        return ending, wait_for(lambda: descendants(worker.pid))[0]

    with ThreadPoolExecutor(1) as pool:
        ending, sweep = begin(pool)
        first = measuring(sweep)
        os.kill(first[0], signal.SIGKILL)
        wait_for(lambda: not {*first} & {*descendants(1)})
        second = measuring(sweep)
        os.kill(sweep, signal.SIGTERM)
        stopped = ending.result()
        assert stopped.code == 75, stopped.err
        assert "SIGTERM: stopped" in stopped.err
        rows = json.loads(stopped.out)["rows"]
        assert [row["status"] for row in rows] == ["lost", "waiting"]
        assert "its worker ended: signal 9" in rows[0]["message"]
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in second), seconds=20)

        ending, sweep = begin(pool)  # The lost row is kept; the second variant runs.
        third = measuring(sweep)
        os.kill(sweep, signal.SIGKILL)
        assert ending.result().code == -signal.SIGKILL
        wait_for(lambda: not {*third} & {*descendants(1)})
        tags = [json.loads(line)["tags"] for line in (out / RECORDS).read_text().splitlines()]
        assert tags == [["sweep:endless", "variant:one"]]
