"""``batch``: what more tokens at once bring: rate of products, tokens a second of a step, loss of a budget.

Three parts. Products of 1 to 8,192 tokens by the weights of one block, from memory-bound to compute-bound,
with the crossover by the data sheet and by these times. Steps of a whole model by micro-batch, each with its
prediction. And trainings of a small model on one budget of tokens by batch, from one seed, with the largest
batch whose loss is as low as the best.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from trainfit.bench.harness.bench import Bench, Part, Point, failure_of, failures, fp32_products, value
from trainfit.bench.harness.experiment import Column, Experiment, Plot
from trainfit.bench.harness.memory_measure import start_afresh
from trainfit.bench.harness.memory_prediction import predictions
from trainfit.bench.harness.roofline import Work
from trainfit.bench.harness.timing import Lap, Rule
from trainfit.bench.workloads import few_tokens, token_budget
from trainfit.catalog.load import model_config
from trainfit.catalog.names import CPU
from trainfit.flops.shape import shape_of
from trainfit.prediction.predict import predict
from trainfit.spec.bench import BenchRow, Cell
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Estimate
from trainfit.step import assemble

BLOCK = {"tiny": "tiny-llama-demo", "full": "llama-3.1-8b"}
TOKENS = {"tiny": (1, 16, 256), "full": tuple(2**power for power in range(14))}
MODEL = {"tiny": "tiny-llama-demo", "full": "llama-3.2-1b"}
MICRO = {
    "tiny": ((1, 32), (2, 32)),
    "full": ((1, 128), (1, 512), (1, 2048), (2, 2048), (4, 2048), (8, 2048)),
}
"""Sequences and their length; 4 x 2,048 is the reference of evidence/pages/techniques.md."""
STEPS = Rule(warmup=2, min_samples=5, max_samples=20, spread=0.05, cap_s=2.0, flush=False)
TOLERANCE = 0.01
"""Share of the loss by which a batch may be above the best and count as no worse."""


def run(bench: Bench) -> Iterator[BenchRow]:
    """Yield products by tokens, steps by micro-batch, and losses by batch, the largest first."""
    points: list[Point] = [
        {"model": MODEL[bench.form], "step of": micro * seq, "micro": micro, "seq": seq}
        for micro, seq in MICRO[bench.form]
    ]
    recipes = {json.dumps(point): _recipe(bench, point) for point in bench.wanted(points)}
    ahead = list(recipes.values()) if bench.gpu is not None and not bench.late() else []
    with predictions(ahead, bench.device, predict) as predicted:
        yield from _products(bench)
        yield from _steps(bench, points, recipes, predicted)
    yield from _budget(bench)


def _products(bench: Bench) -> Iterator[BenchRow]:
    name = BLOCK[bench.form]
    element_bytes = few_tokens.DTYPES[bench.device.type].itemsize
    block = few_tokens.block_of(shape_of(model_config(name)), element_bytes)
    sheet = few_tokens.sheet_rates(bench.gpu)
    crossovers: list[Point] = [
        {"block of": name, "crossover by": source} for source in ("data sheet", "times")
    ]
    seconds: dict[int, float] = {}
    for tokens in TOKENS[bench.form]:
        point: Point = {"block of": name, "tokens": tokens}
        written = block.moved_bytes(tokens) - block.read_bytes(tokens)
        work = Work(block.flops(tokens), "bf16", block.read_bytes(tokens), written) if sheet else None
        part = Part(point, work=work, rates=partial(_product_rates, block, tokens, sheet))
        build = partial(few_tokens.products, block, tokens, bench.device)
        rule = replace(bench.rule, hide=bench.device.type == "cuda")
        for row in bench.time([part], build, rule, needed_by=crossovers[1:]):
            if row.times is not None:
                seconds[tokens] = row.times.median
            if bench.wants(point):
                yield row
    if sheet is not None and (crossover := block.crossover(*sheet)) is not None:
        flops, num_bytes = sheet
        rates: dict[str, Cell] = {"tflops_per_s": flops / 1e12, "gb_per_s": num_bytes / 1e9}
        yield from bench.find(crossovers[0], lambda: {"crossover_tokens": crossover, **rates})
    if len(seconds) > 1:
        fewest, most = min(seconds), max(seconds)
        reached: dict[str, Cell] = {
            "crossover_tokens": few_tokens.measured_crossover(seconds),
            "tflops_per_s": block.flops(most) / seconds[most] / 1e12,
            "gb_per_s": block.moved_bytes(fewest) / seconds[fewest] / 1e9,
        }
        yield from bench.find(crossovers[1], lambda: reached)


def _product_rates(
    block: few_tokens.Block, tokens: int, sheet: tuple[float, float] | None, seconds: float
) -> Mapping[str, Cell]:
    found: dict[str, Cell] = {
        "tflops_per_s": block.flops(tokens) / seconds / 1e12,
        "gb_per_s": block.moved_bytes(tokens) / seconds / 1e9,
        "per_token_s": seconds / tokens,
    }
    if sheet is not None:
        least = block.least_s(tokens, *sheet)
        found["roofline_s"] = max(least)
        found["roofline_tflops_per_s"] = block.flops(tokens) / max(least) / 1e12
        found["of_roofline"] = max(least) / seconds
        found["bound"] = "compute" if least[0] >= least[1] else "memory"
    return found


def _steps(
    bench: Bench, points: list[Point], recipes: Mapping[str, Recipe], predicted: Callable[[Recipe], Estimate]
) -> Iterator[BenchRow]:
    """Yield a step for each micro-batch: tokens a second, MFU and peak, measured and predicted."""
    for point in bench.wanted(points):
        recipe, numbers = recipes[json.dumps(point)], dict[str, Cell]()
        part = Part(point, rates=partial(_step_rates, bench, recipe, predicted), held=numbers)
        yield from bench.time([part], partial(_step, bench, recipe, numbers), STEPS)


def _recipe(bench: Bench, point: Point) -> Recipe:
    """Return the reference recipe with this batch, on this device."""
    on_cuda = bench.device.type == "cuda"
    unknown = "h200" if on_cuda else CPU
    return recipe_from({
        "model": {"config": point["model"]}, "batch": {"micro": point["micro"], "seq": point["seq"]},
        "precision": "bf16" if on_cuda else "fp32",
        "optimizer": {"implementation": "fused" if on_cuda else "foreach"},
        "hardware": {"gpu": bench.gpu.name if bench.gpu else unknown},
    })  # fmt: skip


def _step(bench: Bench, recipe: Recipe, numbers: dict[str, Cell]) -> Any:
    on_cuda = bench.device.type == "cuda"
    held = start_afresh(bench)
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(bench.device)
    step = assemble(recipe, bench.device)
    batches = step.random_batches()

    def run_step(lap: Lap) -> object:
        found = step(batches)
        if on_cuda:
            numbers["peak_bytes"] = torch.cuda.max_memory_allocated(bench.device) - held
        return found

    return run_step


def _step_rates(
    bench: Bench, recipe: Recipe, predicted: Callable[[Recipe], Estimate], seconds: float
) -> Mapping[str, Cell]:
    found: dict[str, Cell] = {"tokens_per_s": recipe.batch.tokens / seconds}
    if bench.gpu is None:
        return found
    try:
        estimate = predicted(recipe)
    except Exception as error:  # The measurement stands without it.
        return found | {"not_predicted": ": ".join(failure_of(error))}
    found["mfu"] = estimate.model_flops / seconds / bench.gpu.peak_flops_per_s["bf16"]
    found["predicted_peak_bytes"] = estimate.peak_allocated_bytes
    if estimate.step_s is not None:
        found["predicted_tokens_per_s"] = recipe.batch.tokens / estimate.step_s
    if estimate.mfu is not None:
        found["predicted_mfu"] = estimate.mfu
    return found


def _budget(bench: Bench) -> Iterator[BenchRow]:
    """Yield a run for each batch and learning rate, the best rate's losses, and the largest useful batch.

    A limit of time cuts what says least: rates other than the first of the smallest batches, which take the
    most steps, then the smallest batches.
    """
    size = token_budget.size_of(bench.form, bench.device)
    summary: Point = {"budget": size.budget, "batches": "compared"}
    curves, rates = _budget_points(size)
    needed = [batch for batch in curves if bench.wanted([*curves[batch], summary])]
    wanted = [batch for batch in curves if batch in needed or bench.wanted(rates[batch].values())]
    pace, losses = token_budget.Pace(size), dict[int, float]()
    for batch in wanted:
        runs: list[token_budget.Trained] = []
        message = "no learning rate was tried"
        for factor, point in rates[batch].items():
            if batch not in needed and not bench.wants(point):
                continue
            later = [one for one in wanted if one < batch and factor != size.factors[0]]
            for row in _rate(bench, pace, batch, factor, point, later, runs):
                message = row.message
                if bench.wants(point):
                    yield row
        best = min(runs, key=lambda run: run.last, default=None)
        if best is not None:
            losses[batch] = best.last
            yield from _losses(bench.wanted(curves[batch]), best)
        elif batch in needed:
            yield from failures(bench.wanted(curves[batch]), "not-run", message)
    if bench.wants(summary):
        yield _compared(summary, size, losses)


def _budget_points(size: token_budget.Size) -> tuple[dict[int, list[Point]], dict[int, dict[float, Point]]]:
    """Return the points by batch, the largest first: of the tokens seen, and of the learning rates."""
    curves: dict[int, list[Point]] = {}
    rates: dict[int, dict[float, Point]] = {}
    for batch in sorted(size.batches, reverse=True):
        seen = [batch * -(-size.budget * (at + 1) // size.points // batch) for at in range(size.points)]
        curves[batch] = [{"budget": size.budget, "batch": batch, "seen": tokens} for tokens in seen]
        rates[batch] = {
            factor: {"budget": size.budget, "batch": batch, "rate": factor} for factor in size.factors
        }
    return curves, rates


def _rate(
    bench: Bench, pace: token_budget.Pace, batch: int, factor: float, point: Point, later: list[int],
    runs: list[token_budget.Trained],
) -> Iterator[BenchRow]:  # fmt: skip
    """Yield the row of one training and add it to ``runs``; not-run where the limit leaves too little time.

    Args:
        later: batches for one run of which time is kept, the largest first.
    """
    lr = pace.size.rate(batch, factor)

    def find() -> token_budget.Trained:
        with fp32_products("tf32" if bench.device.type == "cuda" else "fp32"):
            return token_budget.train(pace.size, batch, lr, bench.device)

    def rows(found: token_budget.Trained) -> Iterator[BenchRow]:
        pace.add(batch, found)
        if math.isinf(found.last):
            yield from failures([point], "failed", f"the training diverged at a learning rate of {lr:g}")
            return
        runs.append(found)
        yield value(point, loss=found.last, lr=lr, steps=found.steps, step_s=found.step_s)

    while later and pace.needed_s(later) > bench.left_s():
        later = later[:-1]  # It will be cut, whatever runs now.
    missing_s = pace.needed_s([batch, *later]) - bench.left_s()
    if bench.late() is None and missing_s > 0:
        why = f"cut: the experiment's time limit is {math.ceil(missing_s):,} s too short"
        yield from failures([point], "not-run", why)
    else:
        yield from bench.attempt([point], find, rows)


def _losses(points: list[Point], found: token_budget.Trained) -> Iterator[BenchRow]:
    for point in points:
        loss = found.losses[int(point["seen"])]
        yield value(point, loss=loss, lr=found.lr, steps=int(point["seen"]) // int(point["batch"]))


def _compared(summary: Point, size: token_budget.Size, losses: Mapping[int, float]) -> BenchRow:
    """Return the largest useful batch of those that were trained."""
    if len(losses) < 2:
        return BenchRow(point=summary, status="not-run", message="fewer than two batches were trained")
    found = token_budget.largest_useful(losses, TOLERANCE)
    best = min(losses, key=lambda batch: losses[batch])
    return value(
        summary, useful_tokens=found, steps=size.steps(found), loss=losses[found], best_tokens=best,
        num_batches=len(losses), source_loss=token_budget.source_loss(token_budget.held_out()),
    )  # fmt: skip


EXPERIMENT = Experiment(
    title="Batch size: products, steps, loss of a budget",
    question="From which batch on is a GPU busy, and beyond which does a larger one bring nothing?",
    run=run,
    limit_s=240,
    columns=(
        Column("tflops_per_s", "TFLOP/s"),
        Column("gb_per_s", "GB/s"),
        Column("per_token_s", "a token"),
        Column("roofline_s", "roofline", note="the least time that the data sheet allows"),
        Column("roofline_tflops_per_s", "roofline, TFLOP/s"),
        Column("of_roofline", "of roofline", ".1%"),
        Column("bound", "bound by"),
        Column("crossover_tokens", "crossover, tokens", ",.0f",
               note="tokens from which products are compute-bound"),
        Column("tokens_per_s", "tokens/s", ",.0f"),
        Column("predicted_tokens_per_s", "predicted", ",.0f"),
        Column("mfu", "MFU", ".1%"),
        Column("predicted_mfu", "predicted MFU", ".1%"),
        Column("peak_bytes", "peak"),
        Column("predicted_peak_bytes", "predicted peak"),
        Column("not_predicted", "not predicted"),
        Column("useful_tokens", "largest useful", ",", note="batch whose loss is at most 1 % above the best"),
        Column("best_tokens", "best", ","),
        Column("loss", format=".4f", note="nats a token of held-out sequences, constant learning rate"),
        Column("lr", "learning rate", ".2g"),
        Column("rate", "of the rule", "g",
               note="learning rate over that of the square-root rule; losses by tokens are of the best one"),
        Column("steps"),
        Column("step_s", "a step"),
        Column("num_batches", "batches"),
        Column("source_loss", "loss of the source", ".4f"),
    ),
    plots=(
        Plot(
            x=("tokens",), y="tflops_per_s", series="block of", x_log=True, y_log=True,
            title="Products by the weights of a block", x_label="tokens", y_label="TFLOP/s",
        ),
        Plot(
            x=("step of",), y="tokens_per_s", series="model", x_log=True, title="Steps by micro-batch",
            x_label="tokens of a micro-batch", y_label="tokens a second",
        ),
        Plot(
            x=("seen",), y="loss", series="batch", title="Loss against tokens, by batch in tokens",
            x_label="tokens seen", y_label="nats a token",
        ),
    ),
)  # fmt: skip
