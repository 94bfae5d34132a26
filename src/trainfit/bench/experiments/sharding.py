"""``sharding``: a step's memory, traffic and time by what is sharded: optimizer state, gradients, weights.

ZeRO's stages (arXiv:1910.02054): 1 shards the optimizer's state, 2 also gradients, 3 also weights. Stage 2 is
FSDP2 with ``reshard_after_forward=False``: gathered weights stay whole from the forward to the backward.
Traffic is computed from the collectives that a profiled step called, as rings send them. The accounting is
derived in docs/internals/data-parallel.md.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from trainfit.bench.experiments.collectives import BUS
from trainfit.bench.harness.bench import Bench, Part, Point, fp32_products
from trainfit.bench.harness.experiment import MEDIAN, Column, Experiment, Plot
from trainfit.bench.harness.overlap import events_of, traffic
from trainfit.bench.harness.processes import Rank, Ranks
from trainfit.bench.harness.timing import TOTAL, Rule, Timing, steadied
from trainfit.bench.workloads.replicas import (
    DDP,
    NUM_WARMUP,
    Replica,
    fully_sharded,
    profiled,
    replica,
    seconds_of,
    tidy,
)
from trainfit.bench.workloads.steps import PRECISIONS, native_recipe
from trainfit.spec.bench import BenchRow, Cell
from trainfit.spec.recipe import Recipe
from trainfit.spec.units import GIB

PROCESSES = 2
MODEL = {"tiny": "tiny-llama-demo", "full": "xl"}
MODES = {"tiny": ("fp32",), "full": ("bf16", "fp32")}
BATCH = {"tiny": (1, 16), "full": (4, 512)}
RULE = Rule(min_samples=6, max_samples=6, spread=0.1, flush=False)
NUM_SAMPLES = {"tiny": 2, "full": 6}
WAYS = {
    "none": partial(replica, strategy="bucketed"),
    "ours": partial(replica, strategy="bucketed", sharding="ours"),
    "DDP": partial(replica, strategy=DDP),
    "ZeRO-1": partial(replica, strategy=DDP, sharding="torch"),
    "ZeRO-2": partial(fully_sharded, reshard_after_forward=False),
    "ZeRO-3": partial(fully_sharded, reshard_after_forward=True),
}
WAYS_NOTE = (
    "none and ours: trainfit's DataParallel, ours with ShardedOptimizer; DDP and ZeRO-1: torch's, with "
    "ZeroRedundancyOptimizer in ZeRO-1; ZeRO-2 and ZeRO-3: FSDP2, ZeRO-2 with reshard_after_forward=False"
)
RING = {**BUS, "broadcast": lambda n: (n - 1) / n}
"""Mean bytes that a rank of a ring sends, over the size: all but the last rank pass a broadcast on."""


def run(bench: Bench) -> Iterator[BenchRow]:
    """Yield every way to shard in each precision, all from one group of processes."""
    points: list[Point] = [
        {"model": MODEL[bench.form], "precision": mode, "sharding": way}
        for mode in MODES[bench.form]
        for way in WAYS
    ]
    points = bench.wanted(points)
    arguments = (points, BATCH[bench.form], NUM_SAMPLES[bench.form])
    with Ranks(PROCESSES, bench.device.type, measure, *arguments) as ranks:
        for point in points:
            yield from bench.attempt([point], ranks.results, partial(_rows, bench, point))


def measure(
    rank: Rank, points: Sequence[Point], batch: tuple[int, int], num_samples: int
) -> Iterator[dict[str, Any]]:
    """Yield times, memory and traffic of each point, on one rank."""
    for point in points:
        precision = PRECISIONS[str(point["precision"])]
        recipe = native_recipe(str(point["model"]), precision, *batch, rank.device)
        with fp32_products(precision.products):
            yield _measured(rank, recipe, str(point["sharding"]), num_samples)
        tidy(rank)


def _measured(rank: Rank, recipe: Recipe, way: str, num_samples: int) -> dict[str, Any]:
    memory = _Memory(rank)
    one: Replica = WAYS[way](recipe, rank)
    memory.init()
    seconds: list[float] = []
    for number in range(NUM_WARMUP + num_samples):
        taken = seconds_of(rank, partial(one, on_phase=memory.begin))
        if number >= NUM_WARMUP:
            seconds.append(taken)
        memory.end()
    events, _ = events_of(profiled(rank, one), gzipped=False)
    parameters = list(one.step.model.parameters())
    sent = {
        name: (found.calls, found.elements * parameters[0].itemsize)
        for name, found in traffic(events).items()
    }
    return {
        "seconds": seconds, "memory": memory.found, "sent": sent,
        "weights": sum(parameter.numel() for parameter in parameters) * parameters[0].itemsize,
        "state": sum(map(_state_bytes, one.step.optimizers)),
    }  # fmt: skip


class _Memory:
    """Highest allocated bytes of a rank by moment, of the last step; empty on a CPU."""

    def __init__(self, rank: Rank):
        self.on_gpu = rank.device.type == "cuda"
        self.found: dict[str, int] = {}

    def _note(self, name: str) -> None:
        if self.on_gpu:
            self.found[name] = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()

    def init(self) -> None:
        self._note("init")

    def begin(self, phase: str) -> None:
        if phase == "forward" and self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        elif phase == "optimizer":
            self._note("before")

    def end(self) -> None:
        """Note the end of a step."""
        self._note("after")


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the state that this rank holds."""
    inner: Any = getattr(optimizer, "sharded", None) or getattr(optimizer, "optim", optimizer)
    tensors = [one for state in inner.state.values() for one in state.values() if torch.is_tensor(one)]
    return sum(getattr(one, "_local_tensor", one).nbytes for one in tensors)


def _rows(bench: Bench, point: Point, ranks: list[dict[str, Any]]) -> Iterator[BenchRow]:
    """Yield the row of a point: the slowest rank's times, the highest memory, one rank's mean traffic."""
    slowest = [max(times) for times in zip(*(one["seconds"] for one in ranks), strict=True)]
    first = ranks[0]
    traffic_bytes = sum(RING[name](PROCESSES) * size for name, (_, size) in first["sent"].items())
    numbers: dict[str, Cell] = {
        f"{name}_bytes": max(one["memory"][name] for one in ranks) for name in first["memory"]
    }
    numbers |= {
        "state_bytes": max(one["state"] for one in ranks),
        "traffic_bytes": round(traffic_bytes),
        "traffic_of_weights": traffic_bytes / first["weights"],
        "collectives": ", ".join(f"{calls} {name}" for name, (calls, _) in sorted(first["sent"].items())),
    }
    timing = steadied(Timing(laps={TOTAL: slowest}, runs=list(range(len(slowest)))), RULE)
    yield bench.row(Part(point), timing, numbers)


EXPERIMENT = Experiment(
    title="Sharding optimizer state, gradients and weights",
    question="What do optimizer sharding and ZeRO's stages save, and what do they cost?",
    run=run,
    limit_s=100,
    columns=(
        Column("sharding", note=WAYS_NOTE),
        Column("init_bytes", "init", note="highest allocated memory of a rank while the step is built"),
        Column("before_bytes", "before update", note="the same of a later step's forward and backward"),
        Column("after_bytes", "update", note="the same of its update"),
        Column("state_bytes", "state", note="the optimizer's state of the rank that holds most"),
        Column("traffic_bytes", "traffic", note="mean bytes that a rank sends a step, by rings"),
        Column("traffic_of_weights", "of weights", ".2f", note="traffic over the bytes of all weights"),
        Column("collectives", note="calls a step"),
    ),
    plots=(
        Plot(
            x=("sharding",), y="before_bytes", series="precision", is_bar=True, is_horizontal=True,
            scale=1 / GIB, text=".1f", title="Peak before the update", y_label="GiB",
        ),
        Plot(
            x=("sharding",), y="after_bytes", series="precision", is_bar=True, is_horizontal=True,
            scale=1 / GIB, text=".1f", title="Peak of the update", y_label="GiB",
        ),
        Plot(
            x=("sharding",), y=MEDIAN, series="precision", is_bar=True, is_horizontal=True, scale=1e3,
            text=".0f", title="Step", y_label="ms",
        ),
    ),
)  # fmt: skip
