"""Check and time configurations of FlashAttention: ``python -m evidence.scripts.kernels.attention_tune``.

Every candidate is first compiled and checked, a process each, many at once: a wrong, crashing or hanging one
costs its own time limit only. Then all that were right are timed one after the other by the experiments'
harness (timing.py: clocks watched, no number of a throttled run), against PyTorch's flash, cuDNN and
FlexAttention. Prints a table and writes one JSON line a candidate (``--out``): its configuration, seconds,
TFLOP/s, or what went wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from evidence.scripts.kernels.attention_candidates import Candidate, candidates
from trainfit.spec.printable import say
from trainfit.spec.provenance import commit, now

CHECK_LIMIT_S = 240
"""Of one candidate's process: start, compilation of three variants, six small runs and a large one. A kernel
that hangs when it is compiled ends the process earlier (RUN_LIMIT_S in attention_candidates.py)."""
TIME_LIMIT_S = 60
"""Of one candidate among those that are timed."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Check and time FlashAttention's configurations on this GPU."
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are written here")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--only", default="", help="names in which this regular expression is found")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU, and these kernels run on one")
    chosen_ones = [each for each in candidates() if re.search(chosen.only, each.name)]
    with ThreadPoolExecutor(chosen.workers) as pool:
        checked = list(pool.map(_checked, chosen_ones))
    made = {"made_at": now(), "commit": commit()}
    errors = {row["name"]: row.get("errors") for row in checked}
    wrong = [row for row in checked if "error" in row]
    right = [each for each, row in zip(chosen_ones, checked, strict=True) if "error" not in row]
    with chosen.out.open("w") as file:
        for row in (*wrong, *timed(right)):
            file.write(json.dumps({**made, **row, "errors": errors[row["name"]]}) + "\n")
            file.flush()
            say(_line(row))


def _line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['name']:<58} {row['error'][-110:]}"
    return f"{row['name']:<58} {row['median_s'] * 1e3:8.3f} ms {row['tflops_per_s']:7.1f} TFLOP/s"


def _process(task: str, names: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "evidence.scripts.kernels.attention_candidates", task, *names]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def _end(process: subprocess.Popen[str]) -> None:
    """A hanging kernel ends with its process only."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def _checked(candidate: Candidate) -> dict[str, Any]:
    process = _process("check", [candidate.name])
    alarm = _alarm(process, CHECK_LIMIT_S)
    try:
        output = process.communicate()[0]
    finally:
        alarm.cancel()
    rows = list(_rows(output.splitlines()))
    if rows:
        return rows[-1]
    ended = "compiled too long" if process.returncode == -signal.SIGKILL else output.strip()
    return {"name": candidate.name, "error": ended[-2000:]}


def timed(waiting: list[Candidate]) -> Iterator[dict[str, Any]]:
    """Yield a row each; where the timing process dies, it restarts after the candidate it died of."""
    while waiting:
        process, done = _process("time", [each.name for each in waiting]), 0
        assert process.stdout is not None
        alarm = _alarm(process, 2 * TIME_LIMIT_S)
        other: list[str] = []
        for line in process.stdout:
            rows = list(_rows([line]))
            if not rows:
                other.append(line)
                continue
            alarm.cancel()
            yield from rows
            done += len(rows)
            alarm = _alarm(process, TIME_LIMIT_S)
        process.wait()
        alarm.cancel()
        if done < len(waiting):
            yield {"name": waiting[done].name, "error": "timing ended: " + "".join(other)[-2000:]}
        waiting = waiting[done + 1 :]


def _alarm(process: subprocess.Popen[str], seconds: float) -> threading.Timer:
    alarm = threading.Timer(seconds, _end, [process])
    alarm.start()
    return alarm


def _rows(lines: list[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith('{"name"'):
            yield json.loads(line)


if __name__ == "__main__":
    main()
