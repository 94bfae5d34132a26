"""``ddp``: a step of data parallel by when gradients are averaged and by bucket size, and the bucket model.

Exposed communication is the time of a step minus that of the same step without communication (``no_sync``),
measured in turns by the same processes. It includes what collectives take from computation while both run.
The profiler's times are of one more step: how long communication ran, and how much of it during computation.
The bucket model is derived in docs/internals/data-parallel.md.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainfit.bench.harness.bench import Bench, Part, Point, fp32_products
from trainfit.bench.harness.experiment import MEDIAN, Column, Experiment, Plot
from trainfit.bench.harness.overlap import events_of, timeline, traffic
from trainfit.bench.harness.processes import Rank, Ranks
from trainfit.bench.harness.timing import TOTAL, Rule, Timing, steadied
from trainfit.bench.workloads.replicas import DDP, NUM_WARMUP, profiled, replica, seconds_of, tidy
from trainfit.bench.workloads.steps import PRECISIONS, native_recipe
from trainfit.spec.bench import BenchRow, Cell
from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe
from trainfit.spec.units import MIB

PROCESSES = 2
CASES = {
    "tiny": (("tiny-llama-demo", "fp32", True),),
    "full": (("xl", "bf16", True), ("gpt2-xl", "bf16", False), ("xl", "fp32", False)),
}
"""Model, precision, and whether bucket sizes are compared."""
BATCH = {"bf16": (8, 1024), "fp32": (4, 512)}
"""Sequences and their tokens by precision: enough for the GPU, not the host, to bound the step."""
TINY_BATCH = (1, 16)
STRATEGIES = ("naive", "flat", "overlapped", "bucketed", DDP)
BUCKETED = {"tiny": ("bucketed",), "full": ("bucketed", DDP)}
BUCKET_MB = {"tiny": (0.05, 0.5, 5), "full": (1, 10, 100, 1000)}
USUAL_MB = 25  # PyTorch's default, and ours
NUM_SAMPLES = {"tiny": 2, "full": 6}
RULE = Rule(min_samples=6, max_samples=6, spread=0.1, flush=False)
NUM_POINTS = 200  # Parts of a timeline
FIT, SWEEP = "bucket model of", "buckets of"
TRACE = "ddp-{model}-{precision}-{strategy}.json.gz"


def run(bench: Bench) -> Iterator[BenchRow]:
    """Yield the strategies, bucket sizes and bucket models of each case, all from one group of processes."""
    found: dict[tuple[Cell, ...], dict[str, Any]] = {}
    fits = [fit for case in CASES[bench.form] for fit in _points(bench, case)[1]]
    points = [point for case in CASES[bench.form] for point in _points(bench, case)[0]]
    points = [point for point in points if bench.wants(point) or any(map(bench.wants, _of(point, fits)))]
    device = bench.device.type
    arguments = (
        points,
        TINY_BATCH if bench.form == "tiny" else None,
        NUM_SAMPLES[bench.form],
        bench.folder is not None,
    )
    with Ranks(PROCESSES, device, measure, *arguments) as ranks:
        for point in points:
            yield from bench.attempt([point], ranks.results, partial(_rows, bench, point, found))
    for fit in fits:
        sizes = {key[-1]: one for key, one in found.items() if key[:-1] == tuple(fit.values())}
        yield from bench.find(fit, partial(bucket_model, sizes))


def _points(bench: Bench, case: tuple[str, str, bool]) -> tuple[list[Point], list[Point]]:
    """Return the measured points of a case, and those of its bucket models."""
    model, precision, has_sweep = case
    at: Point = {"model": model, "precision": precision}
    points: list[Point] = [{**at, "strategy": strategy} for strategy in STRATEGIES]
    if not has_sweep:
        return points, []
    points += [
        {**at, SWEEP: name, "bucket_mb": size}
        for name in BUCKETED[bench.form]
        for size in BUCKET_MB[bench.form]
    ]
    return points, [{**at, FIT: name} for name in BUCKETED[bench.form]]


def _of(point: Point, fits: Sequence[Point]) -> list[Point]:
    """Return the bucket model that needs a point."""
    return [fit for fit in fits if list(point.values())[:-1] == list(fit.values())]


def recipe_of(point: Point, device: torch.device, batch: tuple[int, int]) -> Recipe:
    """Return the recipe of one rank; GPT-2 is transformers' model."""
    recipe = native_recipe(str(point["model"]), PRECISIONS[str(point["precision"])], *batch, device)
    if not str(point["model"]).startswith("gpt2"):
        return recipe
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"implementation": "hf"})})


def measure(
    rank: Rank, points: Sequence[Point], batch: tuple[int, int] | None, num_samples: int, has_traces: bool
) -> Iterator[dict[str, Any]]:
    """Yield times, traffic, timeline and peak memory of each point, on one rank.

    Args:
        batch: of every point; None: as its precision's.
    """
    for point in points:
        with fp32_products(PRECISIONS[str(point["precision"])].products):
            yield _measured(
                rank, point, batch or BATCH[str(point["precision"])], num_samples,
                has_traces and "strategy" in point,
            )  # fmt: skip
        tidy(rank)


def _measured(
    rank: Rank, point: Point, batch: tuple[int, int], num_samples: int, has_trace: bool
) -> dict[str, Any]:
    strategy = point.get("strategy", point.get(SWEEP))
    one = replica(
        recipe_of(point, rank.device, batch), rank, strategy, float(point.get("bucket_mb", USUAL_MB))
    )
    seconds: dict[str, list[float]] = {"together": [], "alone": []}
    for number in range(NUM_WARMUP + num_samples):
        for name, do in (("together", one), ("alone", one.alone)):
            taken = seconds_of(rank, do)
            if number >= NUM_WARMUP:
                seconds[name].append(taken)
    peak = torch.cuda.max_memory_allocated() if rank.device.type == "cuda" else None
    events, trace = events_of(profiled(rank, one), has_trace and rank.number == 0)
    line, sent = timeline(events), traffic(events)["all-reduce"]
    (kind,) = {parameter.dtype for parameter in one.wrapper.parameters() if parameter.requires_grad}
    return {
        **seconds, "peak": peak, "timeline": line, "trace": trace, "calls": sent.calls,
        "bytes": sent.elements * kind.itemsize,
    }  # fmt: skip


def _rows(
    bench: Bench, point: Point, found: dict[tuple[Cell, ...], dict[str, Any]], ranks: list[dict[str, Any]]
) -> Iterator[BenchRow]:
    """Yield the row of a point: the slowest rank's times, the first one's timeline, the highest peak."""
    together, alone = (_slowest(ranks, name) for name in ("together", "alone"))
    exposed_s = statistics.median(one - other for one, other in zip(together, alone, strict=True))
    first = ranks[0]
    line = first["timeline"]
    found[tuple(point.values())] = {**first, "exposed_s": exposed_s, "step_s": statistics.median(together)}
    numbers: dict[str, Cell] = {
        "alone_s": statistics.median(alone), "exposed_s": exposed_s,
        "exposed_share": exposed_s / statistics.median(together), "communication_s": line.communication_s,
        "hidden_share": line.hidden_s / line.communication_s if line.communication_s else 0.0,
        "all_reduces": first["calls"], "gradient_bytes": first["bytes"], "profiled_s": line.end,
    }  # fmt: skip
    if first["peak"] is not None:
        numbers["peak_bytes"] = max(one["peak"] for one in ranks)
    timing = steadied(Timing(laps={TOTAL: together}, runs=list(range(len(together)))), RULE)
    row = bench.row(Part(point), timing, numbers)
    if "strategy" in point:
        row = row.model_copy(update={"curve": line.curve(NUM_POINTS)})
        bench.keep(TRACE.format(**point), lambda path: Path(path).write_bytes(first["trace"]))
    yield row


def _slowest(ranks: list[dict[str, Any]], name: str) -> list[float]:
    return [max(times) for times in zip(*(one[name] for one in ranks), strict=True)]


def bucket_model(sizes: Mapping[Cell, Mapping[str, Any]]) -> dict[str, Cell]:
    """Fit s / (n w) + n o to the exposed seconds of bucket sizes in MiB; return what it predicts.

    Raises:
        InputError: fewer than three sizes were measured.
    """
    if len(sizes) < 3:
        remedy = f"select all of {SWEEP}"
        raise InputError("the bucket model needs three bucket sizes", remedy, field=SWEEP, value=len(sizes))
    calls = np.array([one["calls"] for one in sizes.values()], dtype=float)
    num_bytes = float(next(iter(sizes.values()))["bytes"])
    exposed = np.array([one["exposed_s"] for one in sizes.values()])
    terms = np.stack([num_bytes / calls, calls], axis=1)
    scale = np.linalg.norm(terms, axis=0)  # Bytes and calls differ by orders of magnitude.
    inverse_w, overhead = np.linalg.lstsq(terms / scale, exposed, rcond=None)[0] / scale
    residual = exposed - terms @ np.array([inverse_w, overhead])
    spread = float(((exposed - exposed.mean()) ** 2).sum())
    found: dict[str, Cell] = {
        "r_squared": 1 - float((residual**2).sum()) / spread if spread else 0.0,
        "worst_s": float(np.abs(residual).max()),
        "best_measured_mb": float(min(sizes, key=lambda size: sizes[size]["step_s"])),
    }
    if inverse_w <= 0 or overhead <= 0:
        term = "bandwidth" if inverse_w <= 0 else "overhead a call"
        return {**found, "fit": f"no best size: the fitted {term} is not positive"}
    best = (num_bytes * overhead / inverse_w) ** 0.5
    return {
        "link_gb_per_s": 1 / inverse_w / 1e9, "overhead_s": float(overhead),
        "best_predicted_mb": float(best / MIB), **found, "fit": "least squares",
    }  # fmt: skip


EXPERIMENT = Experiment(
    title="Data parallel and its buckets",
    question="How much of a data-parallel step is communication, by strategy and bucket size?",
    run=run,
    limit_s=100,
    files="a trace for Perfetto of the first rank for each strategy (Chrome JSON, gzip)",
    columns=(
        Column("bucket_mb", "MiB a bucket"),
        Column("alone_s", "alone", note="the same step without communication, in turns with the other"),
        Column("exposed_s", "exposed", note="median of the differences"),
        Column("exposed_share", "exposed share", note="of the step"),
        Column("communication_s", "communication", note="under the profiler, with waits for the other rank"),
        Column("hidden_share", "hidden", note="share of communication during computation"),
        Column("all_reduces", "all-reduces"),
        Column("gradient_bytes", "gradients"),
        Column("profiled_s", "profiled", note="the step under the profiler"),
        Column("peak_bytes", "peak", note="highest allocated memory of a rank"),
        Column("link_gb_per_s", "link GB/s", ".3g", note="w of the bucket model s / (n w) + n o"),
        Column("overhead_s", "overhead", note="o of the bucket model, a call"),
        Column("best_predicted_mb", "best MiB, predicted", ".3g", note="sqrt(s w o)"),
        Column("best_measured_mb", "measured", note="size of the shortest step"),
        Column("r_squared", "R²", ".2f", note="of the fit"),
        Column("worst_s", "worst", note="largest error of the fit"),
        Column("fit"),
    ),
    plots=(
        Plot(
            x=("strategy",), y=MEDIAN, series="precision", panels=("model",), is_bar=True, scale=1e3,
            order={"strategy": STRATEGIES}, title="A step, by strategy", y_label="ms",
        ),
        Plot(
            x=("bucket_mb",), y="exposed_s", series=SWEEP, panels=("model", "precision"), x_log=True,
            scale=1e3, title="Exposed communication", x_label="MiB a bucket", y_label="exposed, ms",
        ),
        Plot(
            x=(), y="timeline", panels=("model", "precision", "strategy"), order={"strategy": STRATEGIES},
            title="Computation and communication of a step",
        ),
    ),
)  # fmt: skip
