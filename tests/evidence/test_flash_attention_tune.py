"""The tuning command continues after a candidate that ends its process, and reports what it died of."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from evidence.scripts.kernels import attention_candidates
from evidence.scripts.kernels import attention_tune as tune
from evidence.scripts.kernels import loss_and_blocks as kernel_benchmark
from evidence.scripts.kernels.attention_candidates import candidates
from trainfit.bench.harness.runner import RULES
from trainfit.bench.harness.stopwatch import CpuStopwatch

DIES = """
import json, os, sys
for name in sys.argv[1:]:
    if name == {fatal!r}:
        print("an illegal address", flush=True)
        os._exit(1)
    print(json.dumps({{"name": name, "median_s": 1e-3, "tflops_per_s": 1.0}}), flush=True)
"""


def scripted(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Replace the process that times candidates by one that runs ``code``."""

    def process(task: str, names: list[str]) -> subprocess.Popen[str]:
        command = [sys.executable, "-S", "-c", code, *names]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)

    monkeypatch.setattr(tune, "_process", process)


@pytest.mark.parametrize(("num_timed", "fatal"), [(4, 1), (2, 1)])
def test_a_deadly_candidate_costs_only_itself(
    num_timed: int, fatal: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = candidates()[:num_timed]
    scripted(monkeypatch, DIES.format(fatal=timed[fatal].name))
    rows = list(tune.timed(timed))
    assert [row["name"] for row in rows] == [each.name for each in timed]
    assert ["error" in row for row in rows] == [index == fatal for index in range(num_timed)]
    assert "an illegal address" in rows[fatal]["error"]


def test_a_check_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, "import time; time.sleep(200)")
    monkeypatch.setattr(tune, "CHECK_LIMIT_S", 0.3)
    row = tune._checked(candidates()[0])
    assert row["error"] == "compiled too long"
    json.dumps(row)


def test_a_hanging_kernel_ends_its_process_and_says_so() -> None:
    hangs = """
import time, torch
from evidence.scripts.kernels import attention_candidates as candidates
candidates.RUN_LIMIT_S = 0.2
torch.cuda.synchronize = lambda: time.sleep(200)
candidates._ended(())
"""
    done = subprocess.run([sys.executable, "-c", hangs], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "in _ended" in done.stderr


def test_a_candidate_is_timed_by_the_harness_or_has_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = CpuStopwatch()
    monkeypatch.setattr(attention_candidates, "_stopwatch", lambda: watch)
    monkeypatch.setattr(attention_candidates, "RULE", RULES["tiny"])
    monkeypatch.setattr(attention_candidates, "_timed_tensors", lambda candidate: None)
    monkeypatch.setattr(attention_candidates, "_prepared", lambda *_: lambda: time.sleep(1e-3))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a CPU")
    first = candidates()[0]
    row = attention_candidates.time(first)
    assert row["p10_s"] <= row["median_s"] <= row["p90_s"]
    assert row["tflops_per_s"] == pytest.approx(2 * 16 * 8192**2 * 128 / row["median_s"] / 1e12)
    assert row["samples"] >= RULES["tiny"].min_samples
    monkeypatch.setattr(watch, "throttled", lambda: ("software power cap",))
    monkeypatch.setattr(watch, "rest", lambda seconds: None)
    row = attention_candidates.time(first)
    assert row == {"name": first.name, "error": row["error"]}
    assert "throttled: the clocks were held down" in row["error"]


@pytest.mark.parametrize("command", [tune.main, kernel_benchmark.main])
def test_commands_that_need_a_gpu_say_so_in_one_line(
    command: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = {tune.main: ["--out", str(tmp_path / "rows")], kernel_benchmark.main: [str(tmp_path / "rows")]}
    monkeypatch.setattr(sys, "argv", ["command", *words.get(command, [])])
    with pytest.raises(SystemExit) as ended:
        command()
    assert ended.value.code == 2
    assert "error: torch sees no GPU" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "rows").exists()
