"""``dataloader``: workers, prefetch and pinned memory, until the device no longer waits for its data.

Each sample is some steps over a loader that is already running. A batch costs the host ``PREPARE_S`` of
computation, so workers need cores; the step is a chain of matrix products. The least that the loop can take
is a step whose batch is on the device already.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice, repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from trainfit.bench.harness.bench import Bench, Part, Point
from trainfit.bench.harness.experiment import Column, Experiment, Plot
from trainfit.bench.harness.timing import Lap, Rule
from trainfit.spec.bench import BenchRow, Cell

PREPARE_S = {"tiny": 0.001, "full": 0.02}
SHAPE = {"tiny": (16, 64), "full": (256, 4096)}
"""Of a batch: 4 MiB in full form. Eight workers with eight batches each need 256 MiB of shared memory."""
PRODUCTS = {"tiny": 2, "full": 64}
STEPS = {"tiny": 3, "full": 20}
WORKERS = {"tiny": (0, 1), "full": (0, 1, 2, 4, 8)}
PREFETCH = {"tiny": (2,), "full": (2, 8)}
WAITS_FROM = 0.05  # Share of its time from which the device counts as waiting: the median is known no better
RULE = {
    "tiny": Rule(warmup=1, min_samples=6, max_samples=6, spread=0.5, cap_s=1.0, flush=False),
    "full": Rule(warmup=1, min_samples=6, max_samples=15, spread=0.05, cap_s=8.0, flush=False),
}


class Batches(IterableDataset[Tensor]):
    """Endless random fp32 batches of ``shape``, each after ``prepare_s`` of the host's work."""

    def __init__(self, shape: tuple[int, int], prepare_s: float):
        self.shape, self.prepare_s = shape, prepare_s

    def __iter__(self) -> Iterator[Tensor]:
        values = np.random.default_rng(0).standard_normal(self.shape, dtype=np.float32)
        while True:
            until = time.perf_counter() + self.prepare_s
            batch = np.roll(values, 1)
            while time.perf_counter() < until:  # Not asleep: a core is busy, as in tokenization.
                batch[:8].sort()
            yield torch.from_numpy(batch)


def run(bench: Bench) -> Iterator[BenchRow]:
    """Yield the step alone; then, without and with pinned memory, a batch on the host and loaders."""
    others: list[Point] = []
    for pinned in (False, True) if bench.device.type == "cuda" else (False,):
        others.append(_ready("on the host", pinned))
        others += [
            {"workers": workers, "prefetch": prefetch, "pinned": pinned, "data": "loaded"}
            for workers in WORKERS[bench.form]
            for prefetch in (PREFETCH[bench.form] if workers else (0,))
        ]
    alone_s = None
    for row in _row(bench, _ready("on the device", False), None, others):
        alone_s = row.times.median if row.times is not None else None
        yield row
    for point in others:
        yield from _row(bench, point, alone_s)


def _ready(where: str, pinned: bool) -> Point:
    """Return the point without a loader: the same batch each time."""
    return {"workers": 0, "prefetch": 0, "pinned": pinned, "data": where}


def _row(
    bench: Bench, point: Point, alone_s: float | None, needed_by: Sequence[Point] = ()
) -> Iterator[BenchRow]:
    """Yield one loader's row: seconds of ``STEPS`` steps, and the share of them that the device waited."""

    def rates(seconds: float) -> dict[str, Cell]:
        found: dict[str, Cell] = {"step_s": seconds / STEPS[bench.form]}
        if alone_s is not None:
            found["waiting_share"] = max(0.0, 1 - alone_s / seconds)
            found["waits"] = found["waiting_share"] > WAITS_FROM
        return found

    build = partial(steps, bench, point)
    yield from bench.time([Part(point, rates=rates)], build, RULE[bench.form], needed_by=needed_by)


def steps(bench: Bench, point: Point) -> Callable[[Lap], object]:
    """Return a run of ``STEPS`` steps, each on the next batch."""
    shape, device = SHAPE[bench.form], bench.device
    weight = torch.randn(shape[1], shape[1], device=device) / shape[1] ** 0.5
    batches = batches_of(point, shape, PREPARE_S[bench.form], device)

    def run(lap: Lap) -> Tensor:
        x = weight
        for batch in islice(batches, STEPS[bench.form]):
            x = batch.to(device, non_blocking=True)
            for _ in range(PRODUCTS[bench.form]):
                x = x @ weight
        return x

    return run


def batches_of(
    point: Point, shape: tuple[int, int], prepare_s: float, device: torch.device
) -> Iterator[Tensor]:
    """Return endless batches of the point: one that is ready, or those of a running loader."""
    source = Batches(shape, prepare_s)
    if point["data"] != "loaded":
        one = next(iter(source))
        if point["data"] == "on the device":
            return repeat(one.to(device))
        return repeat(one.pin_memory() if point["pinned"] else one)
    workers = int(point["workers"])
    options: dict[str, Any] = {"prefetch_factor": int(point["prefetch"])} if workers else {}
    options |= {"num_workers": workers, "pin_memory": bool(point["pinned"])}
    return iter(DataLoader(source, batch_size=None, **options))


EXPERIMENT = Experiment(
    title="Loading data while the device computes",
    question="How many workers and how much prefetching until the device no longer waits?",
    run=run,
    limit_s=180,
    columns=(
        Column("step_s", note="one step of the loop, data and computation together"),
        Column("waiting_share", "waiting", note="share beyond a step whose batch is on the device"),
        Column("waits", note="whether that share is above 5 %"),
    ),
    plots=(
        Plot(
            x=("workers",), y="waiting_share", series="pinned",
            where={"data": ("loaded",), "prefetch": (0, 2)},
            names={False: "pageable memory", True: "pinned memory"}, scale=100.0, is_bar=True, text=".1f",
            title="How long the device waits for data, two batches ahead", x_label="workers",
            y_label="% of the loop's time",
        ),
    ),
)  # fmt: skip
