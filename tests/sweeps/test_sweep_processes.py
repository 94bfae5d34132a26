"""Sweeps in processes: one trial a GPU; a dead worker costs a row; a stopped sweep leaves no process."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest

from command_worker import Worker
from tiny_sweep import BASE
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.sweep import MeasurePart
from trainfit.sweeps import local
from trainfit.sweeps.journal import RECORDS
from trainfit.sweeps.parts import PartRequest, ended


class FakeWorker:
    """In place of a worker's process: ends its trial when it is next looked at, after those begun with it."""

    log: ClassVar[list[tuple[str, dict[str, str]]]] = []
    open: ClassVar[set[int]] = set()

    def __init__(self, role: str, device: str, environment: dict[str, str]):
        self.environment, self._looks, self.is_alive = environment, 0, True
        self.request: Any = None
        self._ends = os.pipe()
        FakeWorker.open.add(id(self))

    def fileno(self) -> int:
        return self._ends[0]

    def take(self, request: Any, on_start: Any) -> None:
        self.request, self._looks = request, 0
        on_start(request)
        FakeWorker.log.append((request.variant, self.environment))

    def result(self, on_start: Any) -> Any:
        self._looks += 1
        if self._looks < 2:
            return None
        request, self.request = self.request, None
        FakeWorker.log.append((f"end of {request.variant}", self.environment))
        return ended(request, "done", seconds=1.0)

    def leave(self) -> None: ...

    def close(self) -> None:
        FakeWorker.open.discard(id(self))
        for end in self._ends:
            os.close(end)


def requests(counts: dict[str, int], part: Any = "measure") -> list[PartRequest]:
    how: dict[str, Any] = {"part": part, "device": "auto", "timeout_s": 60.0, "measure": MeasurePart()}
    model = {"model": {"config": "gpt2"}}
    return [
        PartRequest(variant=name, recipe=recipe_from({**model, "hardware": {"count": count}}), **how)
        for name, count in counts.items()
    ]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[str, str, str]]]:
    """Run requests on faked GPUs 3, GPU-5, 6 and 7; return variant, status and message as they end."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5,6,7")
    monkeypatch.setattr(local, "Worker", FakeWorker)
    monkeypatch.setattr(local, "POLL_S", 0.0)
    monkeypatch.setattr(FakeWorker, "log", [])

    def go(counts: dict[str, int], part: str = "measure", **how: Any) -> list[tuple[str, str, str]]:
        executor = local.LocalExecutor("auto", **how)
        results = executor.run(requests(counts, part), stop=lambda: False, on_start=lambda one: None)
        found = [(one.variant, end.outcome.status, end.outcome.message) for one, end in results]
        assert not FakeWorker.open
        return found

    return go


def gpus_at_once() -> list[list[str]]:
    """Return the GPUs in use after each start and end of a trial."""
    in_use: dict[str, list[str]] = {}
    found = []
    for event, environment in FakeWorker.log:
        if event.startswith("end of "):
            del in_use[event.removeprefix("end of ")]
        else:
            in_use[event] = environment["CUDA_VISIBLE_DEVICES"].split(",")
        found.append([gpu for gpus in in_use.values() for gpu in gpus])
    return found


def test_a_trial_takes_the_gpus_of_its_recipe_and_shares_none(run: Any) -> None:
    counts = {"one": 1, "two": 2, "four": 4, "also two": 2, "more": 1, "last": 1}
    for jobs in (None, 1, 2, 4):
        FakeWorker.log.clear()
        assert {(name, status) for name, status, _ in run(counts, jobs=jobs)} == {
            (name, "done") for name in counts
        }
        taken = {name: environment["CUDA_VISIBLE_DEVICES"] for name, environment in FakeWorker.log}
        assert {name: len(taken[name].split(",")) for name in counts} == counts
        at_once = gpus_at_once()
        assert all(len(gpus) == len({*gpus}) for gpus in at_once)
        trials = [sum(not event.startswith("end") for event, _ in FakeWorker.log[:index]) -
                  sum(event.startswith("end") for event, _ in FakeWorker.log[:index])
                  for index in range(len(FakeWorker.log) + 1)]  # fmt: skip
        assert max(trials) <= (jobs or 4)
        assert max(map(len, at_once)) == 4
        assert next(name for name, _ in FakeWorker.log) == "four"  # The largest first


def test_a_trial_for_more_gpus_than_there_are_is_refused_before_any_begins(run: Any) -> None:
    found = run({"one": 1, "eight": 8, "two": 2})
    line = "hardware.count = 8: this machine shows 4 GPUs; use a machine with 8, or at most 4"
    assert found[0] == ("eight", "refused", line)
    assert {name for name, status, _ in found if status == "done"} == {"one", "two"}
    assert [name for name, _ in FakeWorker.log if "eight" in name] == []


def test_predictions_see_no_gpu_whatever_their_recipe_is_for(run: Any) -> None:
    assert len(run({"eight": 8, "one": 1}, "predict")) == 2
    assert {environment["CUDA_VISIBLE_DEVICES"] for _, environment in FakeWorker.log} == {""}


def test_as_many_jobs_as_gpus_and_on_a_cpu_one(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="use --jobs 4 or fewer"):
        local.LocalExecutor("auto", jobs=5)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(local, "visible_gpus", list)
    assert len(run({"one": 1, "two": 2, "three": 3})) == 3  # Ranks share a CPU.
    assert [environment for _, environment in FakeWorker.log] == [{}] * 6
    assert [name for name, _ in FakeWorker.log][::2] == ["three", "two", "one"]


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
