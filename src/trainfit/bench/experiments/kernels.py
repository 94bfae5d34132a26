"""``kernels``: the time of a training step by kernel, by part of the model and within attention.

The native decoder with attention written out, so that its parts are separate kernels. Each point is first
timed by the harness without the profiler, then one more step runs under it. Times of parts and kernels are
the profiler's; ``median`` is the harness's.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from torch import nn

from trainfit.bench.harness.bench import (
    Bench,
    Failure,
    Part,
    Point,
    failure_of,
    failures,
    fp32_products,
    value,
)
from trainfit.bench.harness.experiment import Column, Experiment, Plot
from trainfit.bench.harness.profiled_trace import write_trace
from trainfit.bench.harness.profiling import (
    PARTS,
    PRODUCTS,
    Launch,
    launches,
    num_launched,
    operation_parts,
    profiler,
    put_in_ranges,
    run_in_phases,
)
from trainfit.bench.harness.timing import TOTAL, Lap, Rule, Timing
from trainfit.bench.workloads.steps import PRECISIONS, SIZES, native_recipe
from trainfit.models.native.decoder import NativeDecoder
from trainfit.spec.bench import BenchRow, Cell
from trainfit.spec.recipe import Recipe
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
"""Model and context, the most important first, the slowest last."""
DETAILED = {("tiny-llama-demo", 64), (LARGEST, 512), (SMALLEST, 512)}
"""Cases whose single kernels are listed, and whose traces are written."""
MODES = ("fp32", "amp-bf16")
REST_S = 2.0
"""Rest before a step after one that throttled: the largest model in bf16 exceeds an H200's power limit."""
SERIES = Rule(warmup=2, min_samples=6, max_samples=40, spread=0.1, cap_s=15.0, flush=False)
"""The second step is the first with AdamW's state and still allocates. Six samples of the longest take 12
s."""
TRIES = 3  # Profiled steps until one runs at full clocks
MOST_BUSY = 1.05
"""Largest plausible kernel time over a step's time: kernels of one stream run one after another."""
TOP = 5

FORWARD, BOTH, WHOLE = "forward", "forward + backward", "whole step"
PASSES = {FORWARD: ("forward",), BOTH: ("forward", "backward"), WHOLE: ("forward", "backward", "optimizer")}
SOFTMAX_FLOPS = {"forward": 5, "backward": 4}
"""FLOPs a score. Forward: compare, subtract, exp, add, divide; backward: multiply, add, subtract,
multiply."""


def run(bench: Bench) -> Iterator[BenchRow]:
    """Yield both precisions of each case."""
    for model, context in CASES[bench.form]:
        for name in MODES:
            point: Point = {"model": model, "precision": name, "context": context}
            with fp32_products(PRECISIONS[name].products):
                yield from _rows(bench, point, recipe_of(bench, point))
            bench.tidy()


def recipe_of(bench: Bench, point: Point) -> Recipe:
    """Return the recipe of one point, with attention written out."""
    precision, seq = PRECISIONS[str(point["precision"])], int(point["context"])
    return native_recipe(
        str(point["model"]), precision, BATCH[bench.form], seq, bench.device, attention="eager"
    )


def _rows(bench: Bench, point: Point, recipe: Recipe) -> Iterator[BenchRow]:
    built: list[tuple[Step, list[Batch]]] = []

    def build() -> Callable[[Lap], object]:
        step = assemble(recipe, bench.device)
        batches = step.random_batches()
        built.append((step, batches))
        return lambda lap: step(batches, on_phase=lap)

    def rows(timing: Timing) -> Iterator[BenchRow]:
        step, batches = built.pop()
        found = _profiled(bench, step, batches, point)
        if bench.device.type == "cuda":  # On a CPU the profiler's own cost is in its times.
            found = _plausible(found, timing)
        launched = found if isinstance(found, list) else []
        for name in PASSES:
            yield _pass_row(bench, {**point, "pass": name}, timing, name, launched)
        if isinstance(found, tuple):
            yield from failures([{**point, "profiled": WHOLE}], *found)
            return
        yield value({**point, "profiled": WHOLE}, **by_part(found))
        yield from core_rows(point, found, step.model, recipe)
        if (point["model"], point["context"]) in DETAILED:
            yield from top_rows(point, found)

    yield from bench.series([{**point, "pass": name} for name in PASSES], build, SERIES, rows)


def _plausible(found: "list[Launch] | Failure", timing: Timing) -> "list[Launch] | Failure":
    """Return what the profiler saw, or a failure where it exceeds the time of a step."""
    times = timing.spread()
    if isinstance(found, tuple) or times is None or seconds_of(found) <= MOST_BUSY * times.median:
        return found
    kernels = format_seconds(seconds_of(found))
    return ("failed", f"{kernels} of kernels in a step of {format_seconds(times.median)}")


def _pass_row(bench: Bench, point: Point, timing: Timing, name: str, found: list[Launch]) -> BenchRow:
    """Return the harness's median of a pass, with what the kernels of the profiled one did."""
    if timing.runs:
        parts = [timing.laps[phase] for phase in PASSES[name]]
        timing.laps[name] = timing.laps[TOTAL] if name == WHOLE else list(map(sum, zip(*parts, strict=True)))
    mine = [launch for launch in found if launch.phase in PASSES[name]]

    def rates(seconds: float) -> dict[str, Cell]:
        if not mine:
            return {}
        if bench.device.type != "cuda":  # The profiler's cost makes operations longer than the step.
            return busy(mine, "operations")
        return {**busy(mine, "kernels"), "busy_share": seconds_of(mine) / seconds}

    return bench.row(Part(point, name, rates=rates), timing, {})


def _profiled(bench: Bench, step: Step, batches: list[Batch], point: Point) -> "list[Launch] | Failure":
    """Return what one step launched at full clocks, or a failure."""
    try:
        put_in_ranges(step.model)
        for _ in range(TRIES):
            with profiler(bench.device) as profile:
                run_in_phases(step, batches)
                held = bench.stopwatch.throttled()
                bench.stopwatch.wait()
            if not held:
                bench.stopwatch.kept()
                break
            bench.stopwatch.rest(REST_S)
        else:
            reasons = ", ".join(held)
            return ("throttled", f"the clocks were held down ({reasons}) in {TRIES} profiled steps")
        events, on_gpu = list(profile.events() or ()), bench.device.type == "cuda"
        if (point["model"], point["context"]) in DETAILED:
            name = "kernels-{model}-{precision}-{context}.json.gz".format(**point)
            bench.keep(name, partial(write_trace, profile, operation_parts(events, on_gpu=on_gpu)))
        found = launches(events, on_gpu=on_gpu)
        if on_gpu and (again := num_launched(step, batches)) != len(found):
            return ("failed", f"{len(found)} kernels in one profiled step, {again} in the next")
        return found
    except Exception as error:  # Any error is this point's result.
        return failure_of(error)


def seconds_of(some: Sequence[Launch]) -> float:
    """Return their total seconds; on a GPU they run one after another."""
    return sum(launch.seconds for launch in some)


def busy(some: Sequence[Launch], what: str) -> dict[str, Cell]:
    """Return how long the device worked and on what; ``what``: kernels, or a CPU's operations."""
    total = seconds_of(some)
    return {
        "busy_s": total,
        what: len(some),
        "products_share": seconds_of([one for one in some if one.op in PRODUCTS]) / total,
        "softmax_share": seconds_of([one for one in some if one.part == "softmax"]) / total,
        "optimizer_share": seconds_of([one for one in some if one.phase == "optimizer"]) / total,
    }


def by_part(found: Sequence[Launch]) -> dict[str, Cell]:
    """Return each part's share of the device's busy time, forward and backward together."""
    total = seconds_of(found)
    return {_share(name): seconds_of([one for one in found if one.part == name]) / total for name in PARTS}


def _share(part: str) -> str:
    return f"{part.replace(' ', '_')}_share"


def core_rows(point: Point, found: Sequence[Launch], model: nn.Module, recipe: Recipe) -> Iterator[BenchRow]:
    """Yield softmax against the two products of attention, in time and in FLOPs."""
    assert isinstance(model, NativeDecoder)
    for phase in ("forward", "backward"):
        mine = {
            name: [one for one in found if (one.phase, one.part) == (phase, name)]
            for name in ("scores", "scale and mask", "softmax", "values")
        }
        products = [one for one in mine["scores"] + mine["values"] if one.op in PRODUCTS]
        products_s, softmax_s = seconds_of(products), seconds_of(mine["softmax"])
        products_flops, softmax_flops = core_flops(model, recipe, phase)
        yield value(
            {**point, "attention's core in": phase},
            products_s=products_s, softmax_s=softmax_s, scale_and_mask_s=seconds_of(mine["scale and mask"]),
            flops_ratio=products_flops / softmax_flops, time_ratio=products_s / softmax_s,
        )  # fmt: skip


def core_flops(model: NativeDecoder, recipe: Recipe, phase: str) -> tuple[float, float]:
    """Return the FLOPs of the two products and of softmax in all layers, masked scores included."""
    config = model.config
    scores = config.num_hidden_layers * recipe.batch.micro * config.num_attention_heads * recipe.batch.seq**2
    products = {"forward": 2, "backward": 4}[phase] * 2 * scores * config.head_dim
    return float(products), float(SOFTMAX_FLOPS[phase] * scores)


def top_rows(point: Point, found: Sequence[Launch]) -> Iterator[BenchRow]:
    """Yield the kernels that take the most time of each pass."""
    for name, phases in PASSES.items():
        mine = [one for one in found if one.phase in phases]
        total = seconds_of(mine)
        kinds: dict[tuple[str, str], list[Launch]] = {}
        for one in mine:
            kinds.setdefault((one.op.removeprefix("aten::"), short(one.kernel)), []).append(one)
        largest = sorted(kinds.items(), key=lambda item: -seconds_of(item[1]))[:TOP]
        for (op, kernel), these in largest:
            seconds = seconds_of(these)
            at: Point = {**point, "top of": name, "operation": op, "kernel": kernel}
            mean_s, share = seconds / len(these), seconds / total
            yield value(at, calls=len(these), total_s=seconds, mean_s=mean_s, share=share)


INSIDE = re.compile(r"(cutlass_\w+|\w*Functor\w*|\w+_kernel_(?:cuda|impl)\b)")
"""Finds the functor of a template that many operations share."""


def short(kernel: str) -> str:
    """Return a kernel's name without namespaces and parameters, at most 60 letters, with its functor."""
    name = kernel.removeprefix("void ").replace("(anonymous namespace)::", "")
    outside, _, inside = name.partition("<")
    plain = outside.partition("(")[0].rpartition("::")[2].strip()
    of = INSIDE.search(inside)
    return (f"{plain} {of[1]}" if of else plain)[:60]


EXPERIMENT = Experiment(
    title="Where a training step's time goes",
    question="Which kernels and parts of the model take the time of a training step?",
    run=run,
    limit_s=150,
    files="a trace for Perfetto of each detailed point (Chrome JSON, gzip)",
    columns=(
        Column("busy_s", "busy", note="sum of the kernels' times in one step under the profiler"),
        Column("kernels"),
        Column("operations", note="PyTorch's operations on a CPU; the profiler's cost is in their times"),
        Column("products_share", "products", note="matrix products, as a share of busy"),
        Column("softmax_share", "softmax"),
        Column("optimizer_share", "optimizer"),
        Column("busy_share", "busy share", note="busy over the median"),
        *(Column(_share(name), name) for name in PARTS if name not in ("softmax", "optimizer")),
        Column("products_s", "products"),
        Column("softmax_s", "softmax"),
        Column("scale_and_mask_s", "scale and mask"),
        Column("flops_ratio", note="FLOPs of attention's two products over softmax's"),
        Column("time_ratio", note="time of attention's two products over softmax's"),
        Column("calls"),
        Column("total_s", "total"),
        Column("mean_s", "mean"),
        Column("share", format=".1%"),
    ),
    plots=(
        Plot(
            x=("model", "precision", "context"), y=tuple(_share(name) for name in PARTS),
            where={"profiled": (WHOLE,)}, scale=100.0, is_bar=True, is_horizontal=True,
            order={"model": SIZES, "precision": MODES, "context": ()},
            title="A whole step by part of the model (model, precision, context)", y_label="% of busy time",
        ),
    ),
)  # fmt: skip
