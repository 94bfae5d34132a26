"""``collectives``: all-reduce, all-gather, reduce-scatter and broadcast by size and number of processes.

NCCL between GPUs and gloo between processes on the CPU, in one table: a machine with GPUs measures both, and
where it has fewer GPUs than ranks the rows say so. A sample is several calls one after another, after untimed
calls at which the ranks meet; its time is that of the slowest rank, divided by the number of calls. Calls of
seconds have fewer samples. A row of NCCL has the predicted time too.
Sizes and bandwidths are those of nccl-tests (https://github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md): the
size is that of the whole tensor, on the side where it is whole; algorithm bandwidth is size over time; bus
bandwidth is what each link carries if the collective is a ring.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from trainfit.bench.harness.bench import Bench, Part, Point
from trainfit.bench.harness.experiment import Column, Experiment, Plot
from trainfit.bench.harness.processes import Rank, Ranks
from trainfit.bench.harness.timing import TOTAL, Rule, Timing, steadied
from trainfit.ledger.ledger import Collective
from trainfit.prediction.communication import collective_s
from trainfit.spec.bench import BenchRow, Cell
from trainfit.spec.hardware import Gpu
from trainfit.spec.units import MB

SIZES_MB = {"tiny": (0.01, 0.1), "full": (1, 10, 100, 1000)}
PROCESSES = {"tiny": (2,), "full": (2, 4, 6)}
DEVICES = {"nccl": "cuda", "gloo": "cpu"}
BUS: Mapping[str, Callable[[int], float]] = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
}
"""Bus bandwidth over algorithm bandwidth, by the number of ranks."""
RULE = Rule(warmup=2, min_samples=10, max_samples=10, spread=0.1)
LEAST_SAMPLES, POINT_S, WARMUP_S = 3, 6.0, 0.1
"""Long calls have fewer samples, so that a point takes about ``POINT_S``, and no further warm-up from
``WARMUP_S`` on."""
NUM_CALLS = ((10, 20), (100, 10), (1000, 4))
"""Calls in a sample on GPUs, up to a size in MB; on a CPU one call."""


def run(bench: Bench) -> Iterator[BenchRow]:
    """Yield every collective and size by backend and number of processes."""
    for backend, processes, names in groups(bench):
        points: list[Point] = [
            {"backend": backend, "processes": processes, "collective": name, "size_mb": size}
            for name in names
            for size in SIZES_MB[bench.form]
        ]
        points = bench.wanted(points)
        with Ranks(processes, DEVICES[backend], measure, points) as ranks:
            for point in points:
                yield from bench.attempt([point], ranks.results, partial(_rows, bench, point))


def groups(bench: Bench) -> Iterable[tuple[str, int, Sequence[str]]]:
    """Return backend, number of processes and collectives of each group of processes, in order.

    gloo's all-reduces come before its other collectives, which take as long again.
    """
    on_gpu, is_full = bench.device.type == "cuda", bench.form == "full"
    counts, (first, *rest) = PROCESSES[bench.form], BUS
    nccl = [("nccl", count, tuple(BUS)) for count in counts if on_gpu or is_full]
    gloo = [("gloo", count, names) for names in ((first,), rest) for count in counts if is_full or not on_gpu]
    return [*nccl, *gloo]


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
    call()  # It connects the ranks.
    seconds = _slowest(rank, _timed(rank, call, 1))
    count = max(LEAST_SAMPLES, min(RULE.max_samples, int(POINT_S / (num_calls * seconds))))
    warmup = RULE.warmup if seconds < WARMUP_S else 0
    found: list[float] = []
    for _ in range(count):
        for _ in range(warmup):
            call()
        found.append(_timed(rank, call, num_calls))
    return found


def _timed(rank: Rank, call: Callable[[], Any], num_calls: int) -> float:
    """Return the seconds of a call, of several in a row."""
    begin = _now(rank)
    for _ in range(num_calls):
        call()
    end = _now(rank)
    rank.synchronize()
    seconds = begin.elapsed_time(end) / 1e3 if rank.device.type == "cuda" else end - begin
    return seconds / num_calls


def _slowest(rank: Rank, seconds: float) -> float:
    """Return the largest of all ranks' values, so that all of them take as many samples."""
    value = torch.tensor([seconds], dtype=torch.float64, device=rank.device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


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
        found: dict[str, Cell] = {"algorithm_gb_per_s": per_s, "bus_gb_per_s": per_s * factor}
        if point["backend"] == "nccl" and bench.gpu is not None:
            found["predicted_s"] = predicted_s(point, bench.gpu)
            found["error"] = f"{float(found['predicted_s']) / seconds - 1:+.0%}"
        return found

    yield bench.row(Part(point, rates=rates), timing, {})


def predicted_s(point: Point, gpu: Gpu) -> float:
    """Return the seconds that a step's prediction counts for this collective, between GPUs of one host."""
    processes = int(point["processes"])
    name = str(point["collective"]).replace("-", "_")
    size = round(float(point["size_mb"]) * MB)
    return collective_s(Collective(name, 0, -1, 0, size, num_ranks=processes, span=processes), gpu)


NAMES: dict[Cell, str] = {"nccl": "NCCL between GPUs", "gloo": "gloo on the CPU"}


def _plot(y: str, title: str, y_label: str, scale: float = 1.0) -> Plot:
    """Return a plot of all-reduce over its size, a panel for each backend."""
    names: dict[Cell, str] = {backend: f"{name}: {title}" for backend, name in NAMES.items()}
    names |= {count: f"{count} ranks" for count in PROCESSES["full"]}
    return Plot(
        x=("size_mb",), y=y, series="processes", panels=("backend",), where={"collective": ("all-reduce",)},
        names=names, scale=scale, x_log=True, y_log=True, title=title, x_label="MB", y_label=y_label,
    )  # fmt: skip


EXPERIMENT = Experiment(
    title="Collectives between processes",
    question="How long do collectives take with NCCL and gloo, by kind, size and number of processes?",
    run=run,
    limit_s=150,
    columns=(
        Column("backend"),
        Column("size_mb", "MB", note="fp32, 10^6 bytes; the whole tensor, of which all-gather sends a part"),
        Column("algorithm_gb_per_s", "algorithm GB/s", ".3g", note="size over time"),
        Column("bus_gb_per_s", "bus GB/s", ".3g", note="times 2(n-1)/n, (n-1)/n, (n-1)/n and 1 for n ranks"),
        Column("predicted_s", note="what the prediction of a step counts for it"),
        Column("error", note="of the predicted time, relative to the median"),
    ),
    plots=(
        _plot("median_s", "all-reduce", "ms", 1e3),
        _plot("bus_gb_per_s", "its bus bandwidth", "GB/s"),
    ),
)
