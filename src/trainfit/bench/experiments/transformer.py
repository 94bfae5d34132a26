"""``transformer``: forward, backward and AdamW step of the five sizes small to 2.7B, by precision, compilation and warm-up.

One series of steps from the first one on answers for every number of warm-up steps: with w of them the mean and the standard
deviation are those of the first ten steps that count, from the one on that w went before. A step that ran at held clocks does not count:
``discarded`` says how many among them, ``steps_before`` how many steps really went before the first that counts. Without warm-up the
first step is the question, so where it does not count there is no number. Only the first row's first step also starts the CUDA libraries.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from trainfit.bench.harness.bench import Bench, Experiment, Part, Point, failures, fp32_products
from trainfit.bench.harness.roofline import Work
from trainfit.bench.harness.timing import TOTAL, Lap, Rule, Timing, steadied
from trainfit.spec.bench import BenchRow, Cell
from trainfit.spec.hardware import PeakDtype
from trainfit.spec.recipe import Recipe
from trainfit.spec.recipe_file import recipe_from
from trainfit.spec.result import PHASES
from trainfit.step import Batch, assemble

WARMUPS, NUM_TIMED = (0, 1, 2, 5), 10
SERIES = Rule(warmup=0, min_samples=15, max_samples=15, spread=0.1, cap_s=60.0, flush=False)
"""The first step, with its compile, is not in the cap."""
SIZES = {"tiny": ("tiny-llama-demo",), "full": ("small", "medium", "large", "xl", "2.7b")}
COMPILED = {"tiny": (), "full": ("model", "block")}
BATCH = {"tiny": (1, 16), "full": (4, 512)}


class Precision(NamedTuple):
    """A recipe's precision, how fp32 products are made, and the data sheet's row for it."""

    recipe: str
    products: Literal["fp32", "tf32"]
    peak: PeakDtype


PRECISIONS = {
    "fp32": Precision("fp32", "fp32", "fp32"),
    "tf32": Precision("fp32", "tf32", "tf32"),
    "amp-bf16": Precision("amp-bf16", "fp32", "bf16"),
    "bf16": Precision("bf16", "fp32", "bf16"),
}


def run(bench: Bench) -> Iterator[BenchRow]:
    """Eager first, so that a short limit has every size; then each size compiled, whole and by block."""
    sizes = SIZES[bench.form]
    pairs = [(size, False) for size in sizes]
    pairs += [(size, compiled) for size in sizes for compiled in COMPILED[bench.form]]
    for size, compiled in pairs:
        for name, precision in PRECISIONS.items():
            if name != "tf32" or bench.device.type == "cuda":
                point: Point = {"model": size, "precision": name, "compile": str(compiled).lower()}
                recipe = recipe_of(size, precision, compiled, bench)
                with fp32_products(precision.products):
                    yield from _rows(bench, point, recipe, precision.peak)


def recipe_of(size: str, precision: Precision, compiled: bool | str, bench: Bench) -> Recipe:
    """The recipe of one point: native, fused AdamW on a GPU."""
    micro, seq = BATCH[bench.form]
    implementation = "fused" if bench.device.type == "cuda" else "foreach"
    return recipe_from(
        {
            "model": {"config": size, "implementation": "native"},
            "batch": {"micro": micro, "seq": seq},
            "precision": precision.recipe,
            "compile": compiled,
            "optimizer": {"name": "adamw", "implementation": implementation},
        }
    )


def _rows(bench: Bench, point: Point, recipe: Recipe, peak: PeakDtype) -> Iterator[BenchRow]:
    """A row for each number of warm-up steps."""
    flops, points = [0.0], [{**point, "warm-up": warmup} for warmup in WARMUPS]

    def build() -> Callable[[Lap], object]:
        torch._dynamo.reset()
        step = assemble(recipe, bench.device)
        flops[0] = least_flops(step.model, recipe)
        batches: list[Batch] = step.random_batches()
        return lambda lap: step(batches, on_phase=lap)

    timing = bench.series(points, build, SERIES)
    if not isinstance(timing, Timing):
        yield from timing
        return
    for one in points:
        if not timing.runs:
            yield bench.row(Part(one), timing, {})
            continue
        if one["warm-up"] == 0 and timing.runs[0] > 0:
            why = f"the clocks were held down ({', '.join(timing.reasons)}) in the first step"
            yield from failures([one], "throttled", why)
            continue
        some = timing.after(int(one["warm-up"]), NUM_TIMED)
        if len(some.runs) < NUM_TIMED:
            message = f"{len(timing.runs)} of {SERIES.min_samples} steps came before the time limit"
            yield from failures([one], "not-run", message)
            continue
        judged = steadied(some, replace(SERIES, min_samples=NUM_TIMED, max_samples=NUM_TIMED))
        yield bench.row(
            Part(one, TOTAL, Work(flops[0], peak)), judged, {"steps_before": some.runs[0], **moments(some)}
        )


def moments(timing: Timing) -> dict[str, Cell]:
    """Mean and standard deviation of each phase, seconds, and of the whole step."""
    found: dict[str, Cell] = {}
    for name in (*PHASES, TOTAL):
        samples = timing.laps[name]
        found[f"{name}_mean_s"] = statistics.fmean(samples)
        found[f"{name}_std_s"] = statistics.stdev(samples)
    return found


def least_flops(model: nn.Module, recipe: Recipe) -> float:
    """FLOPs that one step needs at the very least: 6 for each token and weight of a linear layer; attention is left out."""
    linear: list[Any] = [module for module in model.modules() if isinstance(module, nn.Linear)]
    weights = sum(module.weight.numel() for module in linear)
    return 6.0 * weights * recipe.batch.micro * recipe.batch.seq


EXPERIMENT = Experiment("transformer", run, limit_s=540)
