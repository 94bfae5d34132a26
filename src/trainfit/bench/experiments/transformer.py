"""``transformer``: forward, backward and AdamW step of five sizes, by precision, compilation and warm-up.

One series of steps serves every number of warm-up steps: with w of them, mean and standard deviation are
those of the first ten steps kept from step w on. A throttled step is not kept: ``discarded`` counts those
among them, and ``steps_before`` the steps before the first one kept. Without warm-up the first step is the
question, so where it is lost there is no number. Only the first row's first step also starts the CUDA
libraries.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from trainfit.bench.harness.bench import Bench, Part, Point, failures, fp32_products
from trainfit.bench.harness.experiment import MEDIAN, Column, Experiment, Plot
from trainfit.bench.harness.roofline import Work
from trainfit.bench.harness.timing import TOTAL, Lap, Rule, Timing, steadied
from trainfit.bench.workloads.steps import PRECISIONS, SIZES, native_recipe
from trainfit.spec.bench import BenchRow, Cell
from trainfit.spec.hardware import PeakDtype
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import PHASES
from trainfit.step import Batch, assemble

WARMUPS, NUM_TIMED = (0, 1, 2, 5), 10
SERIES = Rule(warmup=0, min_samples=15, max_samples=15, spread=0.1, cap_s=60.0, flush=False)
"""The first step, with its compile, is not in the cap."""
MODELS = {"tiny": ("tiny-llama-demo",), "full": SIZES}
COMPILED = {"tiny": (), "full": ("model", "block")}
BATCH = {"tiny": (1, 16), "full": (4, 512)}


def run(bench: Bench) -> Iterator[BenchRow]:
    """Yield every size eager, then each size compiled, whole and by block."""
    sizes = MODELS[bench.form]
    pairs = [(size, False) for size in sizes]
    pairs += [(size, compiled) for size in sizes for compiled in COMPILED[bench.form]]
    for size, compiled in pairs:
        for name, precision in PRECISIONS.items():
            if name != "tf32" or bench.device.type == "cuda":
                point: Point = {"model": size, "precision": name, "compile": str(compiled).lower()}
                recipe = native_recipe(size, precision, *BATCH[bench.form], bench.device, compile=compiled)
                with fp32_products(precision.products):
                    yield from _rows(bench, point, recipe, precision.peak)


def _rows(bench: Bench, point: Point, recipe: Recipe, peak: PeakDtype) -> Iterator[BenchRow]:
    """Yield a row for each number of warm-up steps."""
    flops, points = [0.0], [{**point, "warm-up": warmup} for warmup in WARMUPS]

    def build() -> Callable[[Lap], object]:
        torch._dynamo.reset()
        step = assemble(recipe, bench.device)
        flops[0] = least_flops(step.model, recipe)
        batches: list[Batch] = step.random_batches()
        return lambda lap: step(batches, on_phase=lap)

    def rows(timing: Timing) -> Iterator[BenchRow]:
        for one in points:
            if not timing.runs:
                yield bench.row(Part(one), timing, {})
                continue
            some = timing.after(int(one["warm-up"]), NUM_TIMED)
            if one["warm-up"] == 0 and timing.runs[0] > 0:
                why = f"the clocks were held down ({', '.join(timing.reasons)}) in the first step"
                yield from failures([one], "throttled", why)
            elif len(some.runs) < NUM_TIMED:
                message = f"{len(timing.runs)} of {SERIES.min_samples} steps came before the time limit"
                yield from failures([one], "not-run", message)
            else:
                judged = steadied(some, replace(SERIES, min_samples=NUM_TIMED, max_samples=NUM_TIMED))
                numbers = {"steps_before": some.runs[0], **moments(some)}
                yield bench.row(Part(one, TOTAL, Work(flops[0], peak)), judged, numbers)

    yield from bench.series(points, build, SERIES, rows)


def moments(timing: Timing) -> dict[str, Cell]:
    """Return mean and standard deviation of each phase and of the whole step, in seconds."""
    found: dict[str, Cell] = {}
    for name in (*PHASES, TOTAL):
        samples = timing.laps[name]
        found[f"{name}_mean_s"] = statistics.fmean(samples)
        found[f"{name}_std_s"] = statistics.stdev(samples)
    return found


def least_flops(model: nn.Module, recipe: Recipe) -> float:
    """Return the least FLOPs of a step: 6 for each token and linear weight, without attention."""
    linear: list[Any] = [module for module in model.modules() if isinstance(module, nn.Linear)]
    weights = sum(module.weight.numel() for module in linear)
    return 6.0 * weights * recipe.batch.micro * recipe.batch.seq


EXPERIMENT = Experiment(
    title="A training step of five sizes",
    question="What does a training step take, by size, precision, compilation and warm-up?",
    run=run,
    limit_s=540,
    columns=(
        Column("warm-up", note="steps before the first one kept"),
        Column("steps_before"),
        *(
            Column(f"{phase}_mean_s", name, deviation=f"{phase}_std_s")
            for phase, name in (*((phase, phase) for phase in PHASES), (TOTAL, "whole step"))
        ),
    ),
    plots=(
        Plot(
            x=("model",), y=MEDIAN, series="precision", panels=("compile",), where={"warm-up": (5,)},
            order={"compile": ("false", "block", "model"), "model": SIZES, "precision": tuple(PRECISIONS)},
            names={"false": "eager", "block": "compiled: blocks", "model": "compiled: whole model"},
            scale=1e3, y_log=True, is_bar=True, title="A training step after 5 warm-up steps",
            x_label="model", y_label="median, ms",
        ),
    ),
)  # fmt: skip
