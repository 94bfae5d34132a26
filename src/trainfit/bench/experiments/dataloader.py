"""``dataloader``: disk, tokenisation, workers, prefetch and pinned memory, until the device does not wait.

Each sample is some steps over a loader that is already running; a step is a chain of matrix products. The
least that the loop can take is a step whose batch is on the device already. First the disk alone, then
batches of text from it (workloads/text_batches.py), then batches of fp32 that cost the host ``PREPARE_S`` of
computation each, which are large enough for pinned memory to matter.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
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
from trainfit.bench.workloads.text_batches import (
    COLD_DISK,
    MEMORY,
    PAGE_CACHE,
    Sizes,
    TextFiles,
    check_evicted,
    evict,
    reads_at_random,
    reads_in_order,
    token_batches,
)
from trainfit.spec.bench import BenchRow, Cell
from trainfit.spec.units import KIB, MIB

PREPARE_S = {"tiny": 0.001, "full": 0.02}
SHAPE = {"tiny": (16, 64), "full": (256, 4096)}
"""Of a batch: 4 MiB in full form. Eight workers with eight batches each need 256 MiB of shared memory."""
PRODUCTS = {"tiny": 2, "full": 64}
STEPS = {"tiny": 3, "full": 20}
WORKERS = {"tiny": (0, 1), "full": (0, 1, 2, 4, 8)}
SIZES = {"tiny": Sizes(64, 8, 4, 64), "full": Sizes(32768, 256, 16, 1024)}
"""Of the text: in full form 227 MB, and 67 MB of tokens."""
TEXT_STEPS = {"tiny": 3, "full": 10}
TOKENISED = ("in the collator", "before")
READ_FROM = (COLD_DISK, PAGE_CACHE, MEMORY)
VARIED_WORKERS = 4  # With these prefetch and pinning are varied, in full form
DISK_BYTES, DISK_PAGES = {"tiny": 64 * KIB, "full": 64 * MIB}, {"tiny": 4, "full": 256}
PREFETCH = {"tiny": (2,), "full": (2, 8)}
WAITS_FROM = 0.05  # Share of its time from which the device counts as waiting: the median is known no better
LOOP, READING = "loop", "reading"  # Laps: what follows the eviction of pages
PAGE_BYTES = 4096
RULE = {
    "tiny": Rule(warmup=1, min_samples=6, max_samples=6, spread=0.5, cap_s=1.0, flush=False),
    "full": Rule(warmup=1, min_samples=6, max_samples=15, spread=0.05, cap_s=8.0, flush=False),
}
TEXT_RULE = {"tiny": RULE["tiny"], "full": replace(RULE["full"], max_samples=8, cap_s=4.0)}


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
    """Yield the disk alone, loaders of text, and loaders of batches that the host computes.

    A limit of time cuts what says least: the many counts of workers of text come last.
    """
    with closing(TextFiles(SIZES[bench.form])) as files:
        for order in ("in order", "at random"):
            for read_from in (COLD_DISK, PAGE_CACHE):
                yield from _disk(bench, files, order, read_from)
        varied, others = _text_points(bench)
        alone_s = None
        alone = _text_point("before", "device", 0, 0, False)
        for row in _text_row(bench, files, alone, None, [*varied, *others]):
            alone_s = row.times.median if row.times is not None else None
            yield row
        for point in varied:
            yield from _text_row(bench, files, point, alone_s)
        yield from _computed(bench)
        for point in others:
            yield from _text_row(bench, files, point, alone_s)


def _disk(bench: Bench, files: TextFiles, order: str, read_from: str) -> Iterator[BenchRow]:
    """Yield the rate of reading a file in one process, without tokenisation or a loader."""
    count = DISK_PAGES[bench.form] if order == "at random" else 1
    num_bytes = count * PAGE_BYTES if order == "at random" else DISK_BYTES[bench.form]

    def build() -> Callable[[Lap], object]:
        assert len(files.starts), "the files are written"
        read = reads_at_random(files.text, count) if count > 1 else reads_in_order(files.text, num_bytes)
        if read_from == COLD_DISK:
            check_evicted(files.text)
        else:
            files.text.read_bytes()

        def run(lap: Lap) -> object:
            if read_from == COLD_DISK:
                evict(files.text)
            lap(READING)
            return read()

        return run

    def rates(seconds: float) -> dict[str, Cell]:
        found: dict[str, Cell] = {"disk_gb_per_s": num_bytes / seconds / 1e9}
        return found | ({"read_s": seconds / count} if count > 1 else {})

    part = Part({"reads": order, "read from": read_from}, lap=READING, rates=rates)
    yield from bench.time([part], build, TEXT_RULE[bench.form], on_host=True)


def _text_points(bench: Bench) -> tuple[list[Point], list[Point]]:
    """Return the points of text: with ``VARIED_WORKERS`` by place, prefetch and pinning; and the others."""
    cuda, form = bench.device.type == "cuda", bench.form
    by_workers: dict[int, list[Point]] = {
        workers: [
            _text_point(tokenised, read_from, workers, PREFETCH[form][0] if workers else 0, cuda)
            for tokenised in TOKENISED
            for read_from in READ_FROM
        ]
        for workers in WORKERS[form]
    }
    varied = by_workers.pop(VARIED_WORKERS, [])
    if varied:
        # At another prefetch than that of the plots, which do not tell pinned from pageable batches.
        changes = [(TOKENISED[0], 1, cuda)]
        changes += [
            (tokenised, 8, pinned) for tokenised in TOKENISED for pinned in dict.fromkeys((cuda, False))
        ]
        varied += [
            _text_point(tokenised, PAGE_CACHE, VARIED_WORKERS, prefetch, pinned)
            for tokenised, prefetch, pinned in changes
        ]
    return varied, [point for points in by_workers.values() for point in points]


def _text_point(tokenised: str, read_from: str, workers: int, prefetch: int, pinned: bool) -> Point:
    return {
        "tokenised": tokenised, "read from": read_from, "workers": workers, "prefetch": prefetch,
        "pinned": pinned,
    }  # fmt: skip


def _text_row(
    bench: Bench, files: TextFiles, point: Point, alone_s: float | None, needed_by: Sequence[Point] = ()
) -> Iterator[BenchRow]:
    steps = TEXT_STEPS[bench.form]
    rates = partial(_rates, steps, alone_s)
    parts = [Part(point, lap=LOOP, rates=rates)]
    build = partial(text_steps, bench, files, point)
    yield from bench.time(parts, build, TEXT_RULE[bench.form], needed_by=needed_by)


def text_steps(bench: Bench, files: TextFiles, point: Point) -> Callable[[Lap], object]:
    """Return a run of ``TEXT_STEPS`` steps, each on the next batch of tokens."""
    device, (rows, width), sizes = bench.device, SHAPE[bench.form], files.sizes
    weight = torch.randn(width, width, device=device) / width**0.5
    if point["read from"] == "device":
        batches: Iterator[Tensor] = repeat(torch.randint(width, (sizes.batch, sizes.seq), device=device))
    else:
        tokenised = point["tokenised"] == "before"
        path = files.tokens if tokenised else files.text
        assert len(files.starts), "the files are written"
        if point["read from"] == COLD_DISK:
            check_evicted(path)
        elif point["read from"] == PAGE_CACHE:
            path.read_bytes()
        batches = token_batches(
            files, tokenised=tokenised, in_memory=point["read from"] == MEMORY,
            workers=int(point["workers"]), prefetch=int(point["prefetch"]), pinned=bool(point["pinned"]),
        )  # fmt: skip

    def run(lap: Lap) -> Tensor:
        if point["read from"] == COLD_DISK:
            evict(path)
        lap(LOOP)
        x = weight
        for batch in islice(batches, TEXT_STEPS[bench.form]):
            tokens = batch.to(device, non_blocking=True)
            x = weight[tokens.flatten()[:rows] % width]  # As an embedding reads its rows.
            for _ in range(PRODUCTS[bench.form]):
                x = x @ weight
        return x

    return run


def _rates(steps: int, alone_s: float | None, seconds: float) -> dict[str, Cell]:
    """Return a step's time, batches per second, and the share of the time that the device waited."""
    found: dict[str, Cell] = {"step_s": seconds / steps, "batches_per_s": steps / seconds}
    if alone_s is not None:
        found["waiting_share"] = max(0.0, 1 - alone_s / seconds)
        found["waits"] = found["waiting_share"] > WAITS_FROM
    return found


def _computed(bench: Bench) -> Iterator[BenchRow]:
    """Yield the step alone; then, without and with pinned memory, a batch on the host and loaders."""
    kinds = (False, True) if bench.device.type == "cuda" else (False,)
    others = [_ready("on the host", pinned) for pinned in kinds]
    others += [
        {"workers": workers, "prefetch": prefetch, "pinned": pinned, "data": "loaded"}
        for workers in WORKERS[bench.form]
        for prefetch in _prefetches(bench.form, workers)
        for pinned in kinds
    ]
    alone_s = None
    for row in _row(bench, _ready("on the device", False), None, others):
        alone_s = row.times.median if row.times is not None else None
        yield row
    for point in others:
        yield from _row(bench, point, alone_s)


def _prefetches(form: str, workers: int) -> tuple[int, ...]:
    """Return the batches ahead of each worker; varied with ``VARIED_WORKERS`` alone."""
    if not workers:
        return (0,)
    return PREFETCH[form] if workers == VARIED_WORKERS else PREFETCH[form][:1]


def _ready(where: str, pinned: bool) -> Point:
    """Return the point without a loader: the same batch each time."""
    return {"workers": 0, "prefetch": 0, "pinned": pinned, "data": where}


def _row(
    bench: Bench, point: Point, alone_s: float | None, needed_by: Sequence[Point] = ()
) -> Iterator[BenchRow]:
    """Yield one loader's row: seconds of ``STEPS`` steps, and the share of them that the device waited."""
    rates = partial(_rates, STEPS[bench.form], alone_s)
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


def _text_plot(tokenised: str, y: str, title: str, y_label: str, scale: float = 1.0) -> Plot:
    """Return a plot of loaders of text by workers, two batches ahead."""
    return Plot(
        x=("workers",), y=y, series="read from", scale=scale, is_bar=True,
        where={"tokenised": (tokenised,), "read from": READ_FROM, "prefetch": (0, 2)},
        title=f"{title}, tokenised {tokenised}", x_label="workers", y_label=y_label,
    )  # fmt: skip


EXPERIMENT = Experiment(
    title="Loading data while the device computes",
    question="When does the device wait for data: by disk, tokenisation, workers, prefetch and pinning?",
    run=run,
    limit_s=120,
    columns=(
        Column("disk_gb_per_s", "GB/s", ".3g"),
        Column("read_s", "a read", note="one of 4 KiB, one after another"),
        Column("read from", note="cold disk and page cache: a lazy data set; memory: one that is cached"),
        Column("batches_per_s", "batches/s", ",.4g"),
        Column("step_s", note="one step of the loop, data and computation together"),
        Column("waiting_share", "waiting", note="share beyond a step whose batch is on the device"),
        Column("waits", note="whether that share is above 5 %"),
    ),
    plots=(
        *(_text_plot(tokenised, "waiting_share", "Waiting for text", "% of the loop's time", 100.0)
          for tokenised in TOKENISED),
        *(_text_plot(tokenised, "batches_per_s", "Text", "batches/s") for tokenised in TOKENISED),
        Plot(
            x=("workers",), y="waiting_share", series="pinned",
            where={"data": ("loaded",), "prefetch": (0, 2)},
            names={False: "pageable memory", True: "pinned memory"}, scale=100.0, is_bar=True, text=".1f",
            title="Waiting for 20 ms of the host, two batches ahead", x_label="workers",
            y_label="% of the loop's time",
        ),
    ),
)  # fmt: skip
