"""Rows, results, device timers and runs of benchmarks as tests make them."""

import math
from collections.abc import Callable
from typing import Any

import torch

from trainfit.bench.harness.bench import Bench
from trainfit.bench.harness.runner import RULES
from trainfit.bench.harness.stopwatch import CpuStopwatch, Stopwatch
from trainfit.spec.bench import BenchResult, BenchRow, Environment

CPU = torch.device("cpu")
CAP = ("software power cap",)
WHERE = Environment(device="a CPU", device_bytes=1, torch="2", python="3", platform="x")


def result_of(*rows: BenchRow, experiment: str = "flash") -> BenchResult:
    return BenchResult(
        experiment=experiment, form="full", rows=rows, environment=WHERE, limit_s=1.0, elapsed_s=1.0,
        settings={"spread": 0.02},
    )  # fmt: skip


class Held(CpuStopwatch):
    """A CPU whose clocks are held down at the readings that ``held`` accepts. It never sleeps."""

    def __init__(self, held: Callable[[int], bool] = lambda reading: True):
        super().__init__()
        self.held, self.num_readings, self.num_rests, self.num_kept = held, 0, 0, 0

    def throttled(self) -> tuple[str, ...]:
        self.num_readings += 1
        return CAP if self.held(self.num_readings - 1) else ()

    def rest(self, seconds: float) -> None:
        self.num_rests += 1

    def kept(self) -> None:
        self.num_kept += 1


def tiny_bench(stopwatch: Stopwatch | None = None, **fields: Any) -> Bench:
    """Return a run in tiny form on a CPU, without a time limit; ``fields`` replace its attributes."""
    usual = {"device": CPU, "form": "tiny", "gpu": None, "rule": RULES["tiny"], "ends_at": math.inf}
    return Bench(stopwatch=stopwatch or CpuStopwatch(), **(usual | fields))
