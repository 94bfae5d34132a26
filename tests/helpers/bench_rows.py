"""Rows and results of benchmarks as tests make them."""

from trainfit.spec.bench import BenchResult, BenchRow, Environment

WHERE = Environment(device="a CPU", device_bytes=1, torch="2", python="3", platform="x")


def result_of(*rows: BenchRow, experiment: str = "flash") -> BenchResult:
    return BenchResult(
        experiment=experiment, form="full", rows=rows, environment=WHERE, limit_s=1.0, elapsed_s=1.0,
        settings={"spread": 0.02},
    )  # fmt: skip
