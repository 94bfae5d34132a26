"""``collectives``: all-reduce, all-gather, reduce-scatter and broadcast by size and number of processes.

NCCL between GPUs, gloo between processes on a CPU. A sample is several calls one after another, after
untimed calls at which the ranks meet; its time is that of the slowest rank, divided by the number of calls.
Sizes and bandwidths are those of nccl-tests (https://github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md): the
size is that of the whole tensor, on the side where it is whole; algorithm bandwidth is size over time; bus
bandwidth is what each link carries if the collective is a ring.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from trainfit.bench.harness.bench import Bench, Part, Point
from trainfit.bench.harness.experiment import Column, Experiment, Plot
from trainfit.bench.harness.processes import Rank, Ranks
from trainfit.bench.harness.timing import TOTAL, Rule, Timing, steadied
from trainfit.spec.bench import BenchRow, Cell
from trainfit.spec.units import MB

SIZES_MB = {"tiny": (0.01, 0.1), "full": (1, 10, 100, 1000)}
PROCESSES = {"cpu": {"tiny": (2,), "full": (2, 4, 6)}, "cuda": {"tiny": (2,), "full": (2, 4)}}
BUS: Mapping[str, Callable[[int], float]] = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
}
"""Bus bandwidth over algorithm bandwidth, by the number of ranks."""
RULE = Rule(warmup=2, min_samples=10, max_samples=10, spread=0.1)
NUM_CALLS = ((10, 20), (100, 10), (1000, 4))
"""Calls in a sample on GPUs, up to a size in MB; on a CPU one call."""


def run(bench: Bench) -> Iterator[BenchRow]:
    """Yield every collective and size, the smallest groups first; one group of processes for each count."""
    for processes in PROCESSES[bench.device.type][bench.form]:
        points: list[Point] = [
            {"processes": processes, "collective": name, "size_mb": size}
            for name in BUS
            for size in SIZES_MB[bench.form]
        ]
        points = bench.wanted(points)
        with Ranks(processes, bench.device.type, measure, points) as ranks:
            for point in points:
                yield from bench.attempt([point], ranks.results, partial(_rows, bench, point))


def measure(rank: Rank, points: Sequence[Point]) -> Iterator[list[float]]:
    """Yield the seconds of a call in each sample, for each point."""
    for point in points:
        call = call_of(str(point["collective"]), float(point["size_mb"]), rank)
        most = next(count for size, count in NUM_CALLS if float(point["size_mb"]) <= size)
        yield samples(rank, call, most if rank.device.type == "cuda" else 1)


def call_of(name: str, size_mb: float, rank: Rank) -> Callable[[], Any]:
    """Return one call of a collective on fp32 tensors."""
    part = torch.ones(int(size_mb * MB / 4 / rank.world_size), device=rank.device)
    whole = torch.zeros(part.numel() * rank.world_size, device=rank.device)
    if name == "all-reduce":
        return partial(dist.all_reduce, whole)
    if name == "broadcast":
        return partial(dist.broadcast, whole, 0)
    # PyTorch 2.13 renamed both.
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return partial(gather, whole, part) if name == "all-gather" else partial(scatter, part, whole)


def samples(rank: Rank, call: Callable[[], Any], num_calls: int) -> list[float]:
    """Return the seconds of a call in each sample, after the warm-up."""
    found: list[float] = []
    for _ in range(RULE.min_samples):
        for _ in range(RULE.warmup):
            call()
        begin = _now(rank)
        for _ in range(num_calls):
            call()
        end = _now(rank)
        rank.synchronize()
        seconds = begin.elapsed_time(end) / 1e3 if rank.device.type == "cuda" else end - begin
        found.append(seconds / num_calls)
    return found


def _now(rank: Rank) -> Any:
    if rank.device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _rows(bench: Bench, point: Point, found: Sequence[Sequence[float]]) -> Iterator[BenchRow]:
    """Yield the row of the slowest rank of each sample."""
    slowest = [max(times) for times in zip(*found, strict=True)]
    timing = steadied(Timing(laps={TOTAL: slowest}, runs=list(range(len(slowest)))), RULE)
    factor = BUS[str(point["collective"])](int(point["processes"]))

    def rates(seconds: float) -> dict[str, Cell]:
        per_s = float(point["size_mb"]) * MB / seconds / 1e9
        return {"algorithm_gb_per_s": per_s, "bus_gb_per_s": per_s * factor}

    yield bench.row(Part(point, rates=rates), timing, {})


EXPERIMENT = Experiment(
    title="Collectives between processes",
    question="How long do collectives take, by kind, size and number of processes?",
    run=run,
    limit_s=90,
    columns=(
        Column("size_mb", "MB", note="fp32, 10^6 bytes; the whole tensor, of which all-gather sends a part"),
        Column("algorithm_gb_per_s", "algorithm GB/s", ".3g", note="size over time"),
        Column("bus_gb_per_s", "bus GB/s", ".3g", note="times 2(n-1)/n, (n-1)/n, (n-1)/n and 1 for n ranks"),
    ),
    plots=(
        Plot(
            x=("size_mb",), y="bus_gb_per_s", series="processes", panels=("collective",), x_log=True,
            y_log=True, title="Bus bandwidth, by number of processes", x_label="MB", y_label="GB/s",
        ),
    ),
)  # fmt: skip
