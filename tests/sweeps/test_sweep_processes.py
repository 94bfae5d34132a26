"""Sweeps in processes of this machine.

One a GPU, a stopped one goes on, and a dead one costs a row and leaves nobody.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tiny_sweep import BASE, sweep_of
from trainfit.spec.errors import InputError
from trainfit.spec.result import Outcome
from trainfit.sweeps import local
from trainfit.sweeps.journal import RECORDS
from trainfit.sweeps.parts import PartRequest, PartResult
from trainfit.sweeps.run import Run


def test_one_trial_a_gpu_and_none_for_predictions(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5")
    both = local.LocalExecutor("auto")
    assert both._measuring(7) == [{"CUDA_VISIBLE_DEVICES": "3"}, {"CUDA_VISIBLE_DEVICES": "GPU-5"}]
    assert local.LocalExecutor("auto", jobs=1)._measuring(7) == [{"CUDA_VISIBLE_DEVICES": "3"}]
    assert {one["CUDA_VISIBLE_DEVICES"] for one in both._predicting(7)} == {""}
    with pytest.raises(InputError, match="use --jobs 2 or fewer"):
        local.LocalExecutor("auto", jobs=3)
    assert local.LocalExecutor("cpu")._measuring(7) == [{}]


# What follows starts real slots, each of which imports torch.

ENDLESS = BASE + "list: [{name: one}]\nmeasure: {steps: 1000000}\nlimits: {seconds: 500}\n"


def command(path: Path, out: Path, *more: str) -> subprocess.Popen[bytes]:
    words = ["sweep", str(path), "--out", str(out), *more]
    code = "import sys; from trainfit.cli.main import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.Popen(
        [sys.executable, "-c", code, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def descendants(pid: int) -> list[int]:
    """Processes below ``pid`` that are running, from /proc."""
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


def wait_for(condition: Any, seconds: float = 90.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)
    return found


def measuring(run: subprocess.Popen[bytes], out: Path) -> list[int]:
    """The slot and its trial, once the prediction is in the journal and the endless measurement goes on."""
    records = out / RECORDS
    wait_for(lambda: records.is_file() and b'"predict"' in records.read_bytes())
    return wait_for(lambda: len(found := descendants(run.pid)) == 2 and found)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_stopped_sweep_goes_on_and_a_killed_one_leaves_nobody_behind(tmp_path: Path):
    path, out = tmp_path / "endless.yaml", tmp_path / "out"
    path.write_text(ENDLESS)
    stopped = command(path, out, "--json")
    pids = measuring(stopped, out)
    stopped.send_signal(signal.SIGTERM)
    told, said = stopped.communicate(timeout=120)
    assert stopped.returncode == 75
    assert b"SIGTERM: stopped" in said
    assert [one["status"] for one in json.loads(told)["rows"]] == ["waiting"]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)

    killed = command(path, out)
    pids = measuring(killed, out)
    killed.kill()
    killed.communicate(timeout=120)
    wait_for(lambda: not any(alive(pid) for pid in pids), 60)
    kinds = [json.loads(line)["kind"] for line in (out / RECORDS).read_text().splitlines()]
    assert kinds == ["predict"]  # the second run kept it, and the measurement left nothing behind


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_slot_that_dies_is_a_lost_row_and_the_next_trial_has_another(tmp_path: Path):
    text = ENDLESS.replace("[{name: one}]", "[{name: one}, {name: two, seed: 1}]")
    sweep = sweep_of(tmp_path, text.replace("500", "2"))
    requests = Run(sweep, None)  # type: ignore[arg-type]
    asked = [requests._request(variant, "measure") for variant in sweep.variants]
    slots: list[int] = []
    others = set(descendants(os.getpid()))  # of earlier tests: multiprocessing's resource tracker

    def kill_the_first(request: PartRequest) -> None:
        if not slots:
            slots.append(wait_for(lambda: [pid for pid in descendants(os.getpid()) if pid not in others])[0])
            os.kill(slots[0], signal.SIGKILL)

    results: list[tuple[PartRequest, PartResult]] = list(
        local.LocalExecutor("cpu").run(asked, stop=lambda: False, on_start=kill_the_first)
    )
    outcomes: list[Outcome] = [result.outcome for _, result in results]
    assert [outcome.status for outcome in outcomes] == ["lost", "timeout"]
    assert "its worker ended: signal 9" in outcomes[0].message
    assert set(descendants(os.getpid())) <= others
