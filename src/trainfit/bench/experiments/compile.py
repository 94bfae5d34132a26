"""``compile``: seconds until compiled code runs, and what a changed length of the input costs.

*First steps*: a training step is built and compiled with an empty cache on disk (``empty``), then once more
with the programs that the first build left there (``kept``), as a second run of a training script finds
them. Before each, what Inductor keeps in memory is dropped. The first compilation of a process also starts
Inductor's workers, which its row includes. ``compile_s`` is the first step less a later one.

*Lengths*: forward and backward of one block, embedding and head, of one length after another. ``static``:
``torch.compile(dynamic=False)``; ``automatic``: PyTorch's default, which makes a size dynamic once it has
changed; ``marked``: the length is marked as dynamic in every batch; ``dynamic``: ``dynamic=True``. Dynamo
compiles a function at most ``recompile_limit`` times (8 by default); later lengths run eagerly.

On a CPU the compiler stops after AOTAutograd (backend ``aot_eager``): each C++ kernel would take seconds.
Graphs are counted alike, and no program is kept.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainfit.bench.harness.bench import Bench, Part, Point, failures, value
from trainfit.bench.harness.experiment import Column, Experiment, Plot
from trainfit.bench.harness.timing import TOTAL, Lap, Rule, Timing
from trainfit.catalog.load import model_config
from trainfit.catalog.text_model import LAYER_KEYS
from trainfit.spec.bench import BenchRow, Cell
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.recipe import Recipe
from trainfit.step import assemble

CACHE = "TORCHINDUCTOR_CACHE_DIR"  # Inductor reads it at each compilation; Triton's folder is within
NUM_STEPS = 8
SERIES = Rule(warmup=0, min_samples=NUM_STEPS, max_samples=NUM_STEPS, spread=0.5, cap_s=30.0, flush=False)
FIRST_LATER = 2  # The first step compiles, the second meets the optimizer's state for the first time
SHAPES = ("static", "automatic", "marked", "dynamic")
LENGTHS = {
    "tiny": (24, 40, 56),
    "full": (512, 576, 640, 704, 768, 832, 896, 960, 1024, 512),
}
NUM_AGAIN = 3
"""Later calls of a length, whose median is its time once it is compiled."""


class Case(NamedTuple):
    """A recipe that is compiled in each of ``ways``; ``kept``: once more with a kept cache."""

    model: str
    layers: int
    implementation: str
    micro: int
    seq: int
    others: Mapping[str, Any]
    ways: tuple[str, ...] = ("block", "model")
    kept: bool = False


CASES = {
    "tiny": (Case("tiny-llama-demo", 2, "native", 1, 16, {"precision": "fp32"}),),
    "full": (
        Case("small", 12, "native", 4, 512, {"precision": "bf16"}, kept=True),
        Case("llama-3.2-1b", 4, "hf", 2, 1024, {"precision": "bf16"}),
        Case("gpt2", 6, "hf", 4, 512, {"precision": "amp-bf16"}, ("model",)),
        Case("qwen3-0.6b", 4, "hf", 2, 1024, {"precision": "bf16", "recompute": "full"}),
    ),
}


def run(bench: Bench) -> Iterator[BenchRow]:
    """Yield first steps of every case, eager and compiled, then the lengths by kind of shapes."""
    for case in CASES[bench.form]:
        yield from _first_steps(bench, case)
    for kind in SHAPES:
        yield from _lengths(bench, kind)


def model_name(case: Case) -> str:
    """Return the name that the rows of a case have."""
    precision = str(case.others["precision"])
    return f"{case.model} ({case.implementation}, {case.layers} layers, {precision})"


def recipe_of(case: Case, compiled: str, device_type: str) -> Recipe:
    """Return the recipe of a case; ``compiled``: ``false``, ``block`` or ``model``."""
    fused = "fused" if device_type == "cuda" else "foreach"
    return recipe_from(
        {
            "model": {
                "config": _of_layers(case.model, case.layers),
                "name": f"{case.model}, {case.layers} layers",
                "implementation": case.implementation,
            },
            "batch": {"micro": case.micro, "seq": case.seq},
            "optimizer": {"name": "adamw", "implementation": fused},
            "compile": False if compiled == "false" else compiled,
            **case.others,
        }
    )


def _of_layers(model: str, layers: int) -> dict[str, Any]:
    config = dict(model_config(model))
    config.update({key: layers for key in LAYER_KEYS if key in config})
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:layers]
    return config


def _first_steps(bench: Bench, case: Case) -> Iterator[BenchRow]:
    point: Point = {"part": "first steps", "model": model_name(case)}
    compiled = [
        {**point, "compile": way, "cache": cache}
        for way in case.ways
        for cache in (("empty", "kept") if case.kept and bench.device.type == "cuda" else ("empty",))
    ]
    eager_s: float | None = None
    eager: Point = {**point, "compile": "false", "cache": "none"}
    for row in _steps(bench, eager, recipe_of(case, "false", bench.device.type), None, compiled):
        eager_s = row.times.median if row.times is not None else None
        yield row
    for way in case.ways:
        ways = [one for one in compiled if one["compile"] == way]
        with TemporaryDirectory() as folder, cache_in(folder):
            for one in ways:
                needed_by = [other for other in ways if other != one]
                recipe = recipe_of(case, way, bench.device.type)
                yield from _steps(bench, one, recipe, eager_s, needed_by)


def _steps(
    bench: Bench, point: Point, recipe: Recipe, eager_s: float | None, needed_by: list[Point]
) -> Iterator[BenchRow]:
    """Yield the row of some steps, the first of which compiles."""

    def build() -> Callable[[Lap], object]:
        forget_programs()
        compiler = partial(_compiled_in_place, bench.device)
        step = assemble(recipe, bench.device, compiler=compiler)
        batches = step.random_batches()
        return lambda lap: step(batches)

    def rows(timing: Timing) -> Iterator[BenchRow]:
        samples = timing.laps.get(TOTAL, [])
        if not timing.runs or timing.runs[0] > 0 or len(samples) <= FIRST_LATER:
            why = "; ".join(filter(None, ("no first step was timed", timing.message)))
            yield from failures([point], "throttled" if timing.reasons else "failed", why)
            return
        later = timing.after(FIRST_LATER, NUM_STEPS)
        numbers = first_numbers(samples, eager_s if recipe.compile else None)
        yield bench.row(Part(point), later, {**numbers, **counts()} if recipe.compile else numbers)

    yield from bench.series([point], build, SERIES, rows, needed_by=needed_by)


def backend(device: torch.device) -> str:
    """Return the compiler's backend: Inductor on a GPU, none of its own on a CPU."""
    return "inductor" if device.type == "cuda" else "aot_eager"


def _compiled_in_place(device: torch.device, module: torch.nn.Module, **settings: Any) -> None:
    module.compile(backend=backend(device), **settings)


def first_numbers(samples: list[float], eager_s: float | None) -> dict[str, Cell]:
    """Return the first two steps, and what the compilation took and from which step on it pays.

    Args:
        samples: seconds of the steps, the first one's included.
        eager_s: a later step of the same recipe without compilation; None: unknown, or this is it.
    """
    found: dict[str, Cell] = {"first_s": samples[0], "second_s": samples[1]}
    if eager_s is None:
        return found
    later_s = statistics.median(samples[FIRST_LATER:])
    found["compile_s"] = samples[0] - later_s
    if later_s < eager_s:
        found["pays_from_steps"] = pays_from(samples[0] - later_s, later_s, eager_s)
    return found


def pays_from(compile_s: float, step_s: float, eager_s: float) -> int:
    """Return the number of steps from which a compiled run is shorter than an eager one."""
    return int(compile_s / (eager_s - step_s)) + 1


def counts() -> dict[str, Cell]:
    """Return the graphs that Dynamo captured since ``forget_programs``."""
    from torch._dynamo.utils import counters

    return {"graphs": int(counters["stats"]["unique_graphs"])}


def forget_programs() -> None:
    """Drop compiled code and what the compiler keeps in memory; files stay."""
    from torch._dynamo.utils import counters
    from torch._inductor.utils import clear_caches

    torch.compiler.reset()
    clear_caches()
    counters.clear()


@contextmanager
def cache_in(folder: str) -> Iterator[None]:
    """Let Inductor and Triton keep compiled programs in ``folder``."""
    before = {name: os.environ.get(name) for name in (CACHE, "TRITON_CACHE_DIR")}
    os.environ[CACHE] = folder
    os.environ["TRITON_CACHE_DIR"] = os.path.join(folder, "triton")
    try:
        yield
    finally:
        forget_programs()
        for name, old in before.items():
            if old is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = old


def _lengths(bench: Bench, kind: str) -> Iterator[BenchRow]:
    lengths = LENGTHS[bench.form]
    points: list[Point] = [
        {"part": "lengths", "shapes": kind, "call": number, "length": length}
        for number, length in enumerate(lengths, 1)
    ]

    def rows(found: list[dict[str, Cell]]) -> Iterator[BenchRow]:
        for point, numbers in zip(points, found, strict=True):
            yield value(point, **numbers)

    if bench.wanted(points):
        yield from bench.attempt(points, partial(_all_lengths, bench, kind), rows)


def _all_lengths(bench: Bench, kind: str) -> list[dict[str, Cell]]:
    """Return seconds and new graphs of each length, in one process of its own programs."""
    case = CASES[bench.form][0]
    model: Any = assemble(recipe_of(case._replace(layers=1), "false", bench.device.type), bench.device).model
    with TemporaryDirectory() as folder, cache_in(folder):
        forget_programs()
        settings: Any = {"static": {"dynamic": False}, "dynamic": {"dynamic": True}}.get(kind, {})
        compiled = torch.compile(model, backend=backend(bench.device), **settings)
        found: list[dict[str, Cell]] = []
        for length in LENGTHS[bench.form]:
            before = int(counts()["graphs"])
            first_s, *again_s = [
                _seconds(bench, compiled, _tokens(case.micro, length, model, bench.device, kind))
                for _ in range(1 + NUM_AGAIN)
            ]
            graphs = int(counts()["graphs"])
            later_s = statistics.median(again_s)
            found.append(
                {
                    "first_s": first_s, "later_s": later_s, "compile_s": max(0.0, first_s - later_s),
                    "new_graphs": graphs - before, "graphs": graphs,
                }
            )  # fmt: skip
    return found


def _tokens(micro: int, length: int, model: Any, device: torch.device, kind: str) -> Tensor:
    tokens = torch.randint(model.embed.num_embeddings, (micro, length), device=device)
    if kind == "marked":
        torch._dynamo.mark_dynamic(tokens, 1)
    return tokens


def _seconds(bench: Bench, compiled: Any, tokens: Tensor) -> float:
    """Return the seconds of a forward and a backward, until the device is done."""
    bench.stopwatch.wait()
    begin = time.perf_counter()
    compiled(tokens, labels=tokens).loss.backward()
    bench.stopwatch.wait()
    return time.perf_counter() - begin


EXPERIMENT = Experiment(
    title="What torch.compile costs before it gains",
    question="How long does compiling take, cold and cached, from which step on does it pay, and what does a "
    "changed length cost?",
    run=run,
    limit_s=150,
    columns=(
        Column("first_s", "first", note="the first step, or the first call of a length: it compiles"),
        Column("second_s", "second", note="the second step"),
        Column("later_s", "later", note="median of later calls of the same length"),
        Column("compile_s", "compile", note="the first less a later one"),
        Column("pays_from_steps", "pays from", note="steps from which the compiled run is the shorter one"),
        Column("new_graphs", note="graphs compiled for this length"),
        Column("graphs", note="graphs compiled so far"),
    ),
    plots=(
        Plot(
            x=("model",), y="compile_s", series="compile", panels=("cache",),
            where={"compile": ("block", "model")}, is_bar=True, is_horizontal=True, text=".1f",
            names={"block": "one block", "model": "whole model", "empty": "empty cache", "kept": "kept"},
            title="Compilation before the first step", y_label="s",
        ),
        Plot(
            x=("call",), y="compile_s", series="shapes", where={"part": ("lengths",)},
            order={"shapes": SHAPES}, title="Compilation at each new length",
            x_label="call with another length", y_label="s",
        ),
    ),
)  # fmt: skip
