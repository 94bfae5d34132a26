"""Measure steps of the scripts on one GPU: each in a process of its own, whole and with a small batch.

``python -m evidence.scripts.script_steps.measure OUT.jsonl [--only NAME ...]``. The time of a step is that
between two optimizer steps, as CUDA events on the GPU's own clock see it; kernels are summed up by the
profiler in later steps, Python's calls are counted in an earlier one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from evidence.scripts.script_steps import scripts

WARMUP, TIMED, PROFILED = 8, 16, 3
COUNTED_STEP = 4
TIMEOUT_S = 150


class _Steps:
    """Follows a script by the hooks of its optimizers; only the first optimizer counts."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.number = 0
        self.first: Any = None
        self.events: list[Any] = []
        self.host: list[float] = []
        self.calls = 0
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self.clocks: list[tuple[int, int]] = []

    def before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Note the optimizer that counts the steps."""
        self.first = self.first or optimizer

    def after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Take the times after an optimizer's step."""
        if optimizer is not self.first:
            return
        self.number += 1
        number = self.number
        sys.setprofile(self._count if number == COUNTED_STEP else None)
        if WARMUP <= number <= WARMUP + TIMED:
            event = self.torch.cuda.Event(enable_timing=True)
            event.record()
            self.events.append(event)
            self.host.append(time.perf_counter())
            if number in (WARMUP + TIMED // 2, WARMUP + TIMED - 1):
                self.clocks.append(_clock())
        if number == WARMUP + TIMED:
            self.torch.cuda.synchronize()
            self.peak = self.torch.cuda.max_memory_allocated(), self.torch.cuda.max_memory_reserved()
            self.profiler.start()
        if number == WARMUP + TIMED + PROFILED:
            self.torch.cuda.synchronize()
            self.profiler.stop()

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        self.calls += event in ("call", "c_call")

    def found(self) -> dict[str, Any]:
        """Return the figures of all steps."""
        seconds = [a.elapsed_time(b) / 1e3 for a, b in zip(self.events, self.events[1:], strict=False)]
        host = [b - a for a, b in zip(self.host, self.host[1:], strict=False)]
        events = self.profiler.events() or []
        kernels = [e for e in events if e.device_type == self.torch.autograd.DeviceType.CUDA]
        busy_s = sum(e.device_time_total for e in kernels if not e.name.startswith("ProfilerStep")) / 1e6
        import transformers

        return {
            "step_s": seconds, "median_s": statistics.median(seconds), "host_s": statistics.median(host),
            "mean_s": statistics.fmean(seconds),
            "busy_s": busy_s / PROFILED, "num_kernels": len(kernels) / PROFILED, "python_calls": self.calls,
            "clocks": self.clocks, "peak_allocated_bytes": self.peak[0], "peak_reserved_bytes": self.peak[1],
            "gpu": self.torch.cuda.get_device_name(), "torch": self.torch.__version__,
            "transformers": transformers.__version__, "python": sys.version.split()[0],
        }  # fmt: skip


def _clock() -> tuple[int, int]:
    """Return the SM clock in MHz and the reasons that hold it, as NVML's bits."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    clock = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
    return clock, pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)


def run_one(name: str, small: bool, into: Path) -> None:
    """Run a script in this process and write its figures."""
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    scripts.quiet()
    steps = _Steps()
    register_optimizer_step_pre_hook(steps.before)
    register_optimizer_step_post_hook(steps.after)
    scripts.named(name)(WARMUP + TIMED + PROFILED, small)
    into.write_text(json.dumps(steps.found()), "utf-8")


def main() -> None:
    """Measure each script."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("into", type=Path)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--one", choices=("small", "whole"), help="in this process, into a JSON file")
    options = parser.parse_args()
    if options.one:
        return run_one(options.only[0], options.one == "small", options.into)
    from trainfit.spec.provenance import commit, now

    for name in options.only or [script.__name__ for script in scripts.LEARNED]:
        for size in ("small", "whole"):
            draft = options.into.with_suffix(".one")
            command = [
                sys.executable,
                "-m",
                "evidence.scripts.script_steps.measure",
                str(draft),
                "--only",
                name,
            ]
            command += ["--one", size]
            row: dict[str, Any] = {"script": name, "size": size, "commit": commit(), "made_at": now()}
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
                row |= {"measured": json.loads(draft.read_text("utf-8"))} if not done.returncode else {
                    "error": done.stderr[-1500:]
                }  # fmt: skip
            except subprocess.TimeoutExpired:
                row |= {"error": f"not done in {TIMEOUT_S} s"}
            with options.into.open("a", encoding="utf-8") as out:
                out.write(json.dumps(row) + "\n")
            draft.unlink(missing_ok=True)
            known = row.get("measured")
            if known is None:
                print(name, size, row["error"][-300:], flush=True)
                continue
            print(
                f"{name} {size} step {known['median_s'] * 1e3:.2f} ms, host {known['host_s'] * 1e3:.2f}, "
                f"busy {known['busy_s'] * 1e3:8.2f}, {known['num_kernels']:6.0f} kernels, "
                f"{known['python_calls']} calls, clocks {known['clocks']}",
                flush=True,
            )


if __name__ == "__main__":
    main()
