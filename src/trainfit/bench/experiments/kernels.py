"""``kernels``: where the time of a training step goes, by kernel, by part of the model and by what attention's core does.

The native decoder with attention written out, so that its parts are kernels of their own. Each point is first timed by the harness
without the profiler, then one more step runs under it. Times of parts and kernels are the profiler's; ``median`` is the harness's.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from trainfit.bench.experiments.transformer import PRECISIONS, Precision
from trainfit.bench.harness.bench import (
    Bench,
    Experiment,
    Failure,
    Part,
    Point,
    failures,
    fp32_products,
    told,
    value,
)
from trainfit.bench.harness.profiled_trace import write_trace
from trainfit.bench.harness.profiling import (
    PARTS,
    PRODUCTS,
    Launch,
    launches,
    num_launched,
    places,
    profiler,
    ranges,
    run_in_phases,
)
from trainfit.bench.harness.timing import TOTAL, Lap, Rule, Timing
from trainfit.models.native.decoder import NativeDecoder
from trainfit.spec.bench import BenchRow, Cell
from trainfit.spec.recipe import Recipe
from trainfit.spec.recipe_file import recipe_from
from trainfit.spec.units import format_seconds
from trainfit.step import Batch, Step, assemble

BATCH = {"tiny": 1, "full": 4}
LARGEST, SMALLEST = "2.7b", "small"
CASES: dict[str, tuple[tuple[str, int], ...]] = {
    "tiny": (("tiny-llama-demo", 64),),
    "full": (
        *((size, 512) for size in (LARGEST, SMALLEST, "medium", "large", "xl")),
        *((size, context) for context in (128, 256, 1024) for size in (SMALLEST, LARGEST)),
    ),
}
"""Model and context, the most telling first, what takes longest last."""
DETAILED = {("tiny-llama-demo", 64), (LARGEST, 512), (SMALLEST, 512)}
"""Whose single kernels are told, and whose traces are written."""
MODES = ("fp32", "amp-bf16")
REST_S = 2.0
"""Rest before a step where one was lost to held clocks: the largest in bf16 is too much work for an H200's power cap."""
SERIES = Rule(warmup=2, min_samples=6, max_samples=40, spread=0.1, cap_s=15.0, flush=False)
"""The second step is the first with AdamW's state, so it still asks for memory. Six samples of the longest step take 12 s."""
TRIES = 3
"""Profiled steps until one runs at full clocks."""
MOST_BUSY = 1.05
"""Of a step's time; kernels of one stream run one after another, so more of it was not this step's."""
TOP = 5

FORWARD, BOTH, WHOLE = "forward", "forward + backward", "whole step"
PASSES = {FORWARD: ("forward",), BOTH: ("forward", "backward"), WHOLE: ("forward", "backward", "optimizer")}
SOFTMAX_FLOPS = {"forward": 5, "backward": 4}
"""A score: compare with the maximum, subtract, exp, add to the sum, divide; its gradient: multiply, add, subtract, multiply."""


@dataclass
class Built:
    """What a point's series built, for the profiled step after it."""

    step: Step | None = None
    batches: list[Batch] = field(default_factory=list)


def run(bench: Bench) -> Iterator[BenchRow]:
    """Both precisions of each case."""
    for model, context in CASES[bench.form]:
        for name in MODES:
            point: Point = {"model": model, "precision": name, "context": context}
            with fp32_products(PRECISIONS[name].products):
                yield from _rows(bench, point, recipe_of(bench, model, context, PRECISIONS[name]))
            bench.tidy()


def recipe_of(bench: Bench, model: str, context: int, precision: Precision) -> Recipe:
    """The recipe of one point: native, attention written out, fused AdamW on a GPU."""
    return recipe_from(
        {
            "model": {"config": model, "implementation": "native"},
            "batch": {"micro": BATCH[bench.form], "seq": context},
            "precision": precision.recipe,
            "attention": "eager",
            "optimizer": {
                "name": "adamw",
                "implementation": "fused" if bench.device.type == "cuda" else "foreach",
            },
        }
    )


def _rows(bench: Bench, point: Point, recipe: Recipe) -> Iterator[BenchRow]:
    built = Built()

    def build() -> Any:
        built.step = assemble(recipe, bench.device)
        built.batches = built.step.random_batches()
        return lambda lap: _timed(built, lap)

    timing = bench.series([{**point, "pass": name} for name in PASSES], build, SERIES)
    if not isinstance(timing, Timing):
        yield from timing
        return
    found = _profiled(bench, built, point)
    if bench.device.type == "cuda":  # On a CPU the profiler's own cost is in what it tells.
        found = _believed(found, timing)
    for name in PASSES:
        yield _pass_row(
            bench, {**point, "pass": name}, timing, name, [] if isinstance(found, tuple) else found
        )
    if isinstance(found, tuple):
        yield from failures([{**point, "profiled": WHOLE}], *found)
        return
    assert built.step is not None
    yield value({**point, "profiled": WHOLE}, **by_part(found))
    yield from core_rows(point, found, built.step.model, recipe)
    if (point["model"], point["context"]) in DETAILED:
        yield from top_rows(point, found)


def _believed(found: "list[Launch] | Failure", timing: Timing) -> "list[Launch] | Failure":
    """What the profiler saw, unless it is more than a step has time for."""
    times = timing.spread()
    if isinstance(found, tuple) or times is None or seconds_of(found) <= MOST_BUSY * times.median:
        return found
    return (
        "failed",
        f"{format_seconds(seconds_of(found))} of kernels in a step of {format_seconds(times.median)}",
    )


def _timed(built: Built, lap: Lap) -> object:
    assert built.step is not None
    return built.step(built.batches, on_phase=lap)


def _pass_row(bench: Bench, point: Point, timing: Timing, name: str, found: list[Launch]) -> BenchRow:
    """The harness's median of a pass, and of the profiled one what its kernels did."""
    if timing.runs:
        parts = [timing.laps[phase] for phase in PASSES[name]]
        timing.laps[name] = (
            timing.laps[TOTAL] if name == WHOLE else [sum(samples) for samples in zip(*parts, strict=True)]
        )
    mine = [launch for launch in found if launch.phase in PASSES[name]]

    def rates(seconds: float) -> dict[str, Cell]:
        if not mine:
            return {}
        if (
            bench.device.type != "cuda"
        ):  # The profiler's cost is in the operations, so they may take more than the step did.
            return busy(mine, "operations")
        return {**busy(mine, "kernels"), "busy_share": seconds_of(mine) / seconds}

    return bench.row(Part(point, name, rates=rates), timing, {})


def _profiled(bench: Bench, built: Built, point: Point) -> "list[Launch] | Failure":
    """What one step launched, at full clocks; or why that is not known."""
    assert built.step is not None
    held: tuple[str, ...] = ()
    try:
        with ranges(built.step.model):
            for _ in range(TRIES):
                with profiler(bench.device) as profile:
                    run_in_phases(built.step, built.batches)
                    held = bench.stopwatch.throttled()
                    bench.stopwatch.wait()
                if not held:
                    bench.stopwatch.kept()
                    break
                bench.stopwatch.rest(REST_S)
            else:
                return (
                    "throttled",
                    f"the clocks were held down ({', '.join(held)}) in {TRIES} profiled steps",
                )
        events, on_gpu = list(profile.events() or ()), bench.device.type == "cuda"
        if (point["model"], point["context"]) in DETAILED:
            name = "kernels-{model}-{precision}-{context}.json.gz".format(**point)
            bench.keep(name, partial(write_trace, profile, places(events, on_gpu=on_gpu)))
        found = launches(events, on_gpu=on_gpu)
        if not on_gpu:
            return found
        if (again := num_launched(built.step, built.batches)) != len(found):
            return ("failed", f"{len(found)} kernels in one profiled step, {again} in the next")
        return found
    except Exception as error:  # Whatever it is, it is this point's result.
        return told(error)


def seconds_of(some: Sequence[Launch]) -> float:
    """Seconds of them together; on a GPU they run one after another."""
    return sum(launch.seconds for launch in some)


def busy(some: Sequence[Launch], what: str) -> dict[str, Cell]:
    """How long the device worked, and on what; ``what`` the profiler saw: kernels, or a CPU's operations."""
    total = seconds_of(some)
    return {
        "busy_s": total,
        what: len(some),
        "products_share": seconds_of([one for one in some if one.op in PRODUCTS]) / total,
        "softmax_share": seconds_of([one for one in some if one.part == "softmax"]) / total,
        "optimizer_share": seconds_of([one for one in some if one.phase == "optimizer"]) / total,
    }


def by_part(found: Sequence[Launch]) -> dict[str, Cell]:
    """Each part's share of the device's working time, forward and backward together."""
    total = seconds_of(found)
    return {
        f"{name.replace(' ', '_')}_share": seconds_of([one for one in found if one.part == name]) / total
        for name in PARTS
    }


def core_rows(point: Point, found: Sequence[Launch], model: nn.Module, recipe: Recipe) -> Iterator[BenchRow]:
    """Softmax against the two products of attention's core, in time and in FLOPs."""
    assert isinstance(model, NativeDecoder)
    for phase in ("forward", "backward"):
        mine = [one for one in found if one.phase == phase]
        products_s = seconds_of(
            [one for one in mine if one.op in PRODUCTS and one.part in ("scores", "values")]
        )
        softmax_s = seconds_of([one for one in mine if one.part == "softmax"])
        products_flops, softmax_flops = core_flops(model, recipe, phase)
        yield value(
            {**point, "attention's core in": phase},
            products_s=products_s,
            softmax_s=softmax_s,
            scale_and_mask_s=seconds_of([one for one in mine if one.part == "scale and mask"]),
            flops_ratio=products_flops / softmax_flops,
            time_ratio=products_s / softmax_s,
        )


def core_flops(model: NativeDecoder, recipe: Recipe, phase: str) -> tuple[float, float]:
    """FLOPs of the two products and of softmax, over all layers; written out, attention computes masked scores too."""
    config = model.config
    scores = config.num_hidden_layers * recipe.batch.micro * config.num_attention_heads * recipe.batch.seq**2
    products = {"forward": 2, "backward": 4}[phase] * 2 * scores * config.head_dim
    return float(products), float(SOFTMAX_FLOPS[phase] * scores)


def top_rows(point: Point, found: Sequence[Launch]) -> Iterator[BenchRow]:
    """The kernels that take the most time of each pass."""
    for name, phases in PASSES.items():
        mine = [one for one in found if one.phase in phases]
        total = seconds_of(mine)
        kinds: dict[tuple[str, str], list[Launch]] = {}
        for one in mine:
            kinds.setdefault((one.op.removeprefix("aten::"), short(one.kernel)), []).append(one)
        largest = sorted(kinds.items(), key=lambda item: -seconds_of(item[1]))[:TOP]
        for (op, kernel), these in largest:
            seconds = seconds_of(these)
            yield value(
                {**point, "top of": name, "operation": op, "kernel": kernel},
                calls=len(these),
                total_s=seconds,
                mean_s=seconds / len(these),
                share=seconds / total,
            )


INSIDE = re.compile(r"(cutlass_\w+|\w*Functor\w*|\w+_kernel_(?:cuda|impl)\b)")
"""What a template that many operations share is of."""


def short(kernel: str) -> str:
    """A kernel's name without namespaces, types and parameters, at most 60 letters; of a shared template also what it is of."""
    name = kernel.removeprefix("void ").replace("(anonymous namespace)::", "")
    outside, _, inside = name.partition("<")
    plain = outside.partition("(")[0].rpartition("::")[2].strip()
    of = INSIDE.search(inside)
    return (f"{plain} {of[1]}" if of else plain)[:60]


EXPERIMENT = Experiment(
    "kernels", run, limit_s=150, files="a trace for Perfetto of each detailed point (Chrome JSON, gzip)"
)
