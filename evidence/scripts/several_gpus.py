"""Recipes for two H200s of one host, drawn by a seed: predict them without a GPU, then measure them.

    python -m evidence.scripts.several_gpus predict PREDICTED.jsonl [--jobs N]
    python -m evidence.scripts.several_gpus measure PREDICTED.jsonl MEASURED.jsonl [--seconds N]
    trainfit report PREDICTED.jsonl MEASURED.jsonl

Lines are records (docs/guide/records-and-report.md). ``predict`` draws each recipe until one is allowed, is
within the card's memory and has a short step; with ``--of FILE`` it predicts the recipes of another file,
such as with other library versions. Both skip what their file has. ``measure`` starts no recipe that
``--seconds`` leaves no time for.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from trainfit.catalog.families import FAMILIES
from trainfit.catalog.load import gpu, model, model_config
from trainfit.records import load
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.parse import parse
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.printable import say
from trainfit.spec.provenance import commit, installed_version, now, to_line
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Estimate, Measurement, Record

Data = dict[str, Any]

GPU, COUNT, SEED = "h200", 2, 14
NUM_RECIPES = 64
FAMILIES_DRAWN = ("gpt2", "gpt-neox", "opt", "llama", "mistral", "qwen2", "qwen3", "gemma", "native")
STRATEGIES = (
    "fsdp", "ddp", "fsdp", "zero1", "fsdp", "bucketed", "fsdp", "naive",
    "fsdp", "ddp", "hsdp", "overlapped", "fsdp", "flat", "tensor", "zero1",
)  # fmt: skip
"""By number of recipe, in turn. As many as have no divisor in common with the families: all pairs occur."""
SHARDED = ("fsdp", "tensor")
LARGEST_PARAMS, LARGEST_COMPILED_PARAMS = 15e9, 1.5e9
DEVICE_SHARES = (0.05, 0.97)
"""Predicted bytes of the device over the card's, of a recipe that is kept."""
LONGEST_STEP_S = 1.2
MOST_DRAWS = 150
"""After as many draws the recipe is one of FSDP2: the strategy is refused or not predicted."""
WARMUP, STEPS = 2, 4
MOST_CRASHES = 3
"""As many crashes in a row are this machine's or the program's, and no results of the recipes."""
LIMIT_S, LEAST_S = 100.0, 25.0
"""Time limit of one measurement, and the least time that is left for one to be started."""


def drawn(chance: random.Random, number: int, strategy: str) -> Data | None:
    """Return the fields of a recipe; None if it cannot be within the card's memory and a short step."""
    family = FAMILIES_DRAWN[number % len(FAMILIES_DRAWN)]
    config = chance.choice(FAMILIES[family])
    layers, hidden, vocabulary, positions, params = _sizes(config)
    if params > LARGEST_PARAMS:
        return None
    precision = _weighted(chance, {"bf16": 4, "fp32": 1, "amp-bf16": 1, "mixed-bf16": 2})
    recompute = chance.choice(
        ("none", "none", "none", "full", "full", "selective", {"every": 2}, {"budget": 0.5})
    )
    optimizer = chance.choice(OPTIMIZERS)
    lora = chance.random() < 0.12
    accumulate = chance.choice((1, 1, 1, 2, 4))
    seq = 2 ** chance.randint(8, 13) - 8 * chance.choice((0, 0, 0, chance.randint(1, 15)))

    # A rough share of the card and length of the step; the prediction decides.
    weight = 2 if precision == "bf16" else 4
    ranks = COUNT if strategy in SHARDED else 1
    state = params * weight * (1 if lora else optimizer["copies"]) / ranks
    room = chance.uniform(*DEVICE_SHARES) * gpu(GPU).usable_bytes - state
    saved = {"none": 34, "selective": 26}.get(str(recompute), 4 if recompute == "full" else 20) * weight / 2
    flops_per_s = 40e12 if precision == "fp32" else 350e12
    tokens = min(
        room / (layers * hidden * saved + 12 * vocabulary),
        LONGEST_STEP_S * flops_per_s / (8 * params * accumulate),
    )
    if tokens < 0.7 * seq or seq > positions:
        return None
    parallel: Data = {"strategy": strategy}
    if strategy == "hsdp":
        parallel = {"replicate": COUNT}
    elif strategy == "tensor":
        parallel = {"tensor": COUNT}
    elif strategy == "fsdp":
        parallel["reshard_after_forward"] = chance.random() < 0.7
    elif strategy in ("ddp", "bucketed", "zero1"):
        parallel["bucket_mb"] = chance.choice((25.0, 25.0, 1.0, 100.0, None))
    if accumulate > 1:
        parallel["sync_each_batch"] = chance.choice((None, True, False))
    # Only compiled code has a budget to keep.
    compiled = params < LARGEST_COMPILED_PARAMS and (chance.random() < 0.07 or recompute == {"budget": 0.5})
    return {
        "model": {"config": config, "implementation": "native" if family == "native" else "hf"},
        "batch": {"micro": max(1, round(tokens / seq)), "seq": seq, "accumulate": accumulate},
        "precision": precision,
        "recompute": recompute,
        "loss": _weighted(chance, {"standard": 4, "chunked": 1, "fused": 1}),
        "compile": "block" if compiled else False,
        "optimizer": {name: value for name, value in optimizer.items() if name != "copies"},
        **({"adapter": {"kind": "lora"}} if lora else {}),
        "parallel": parallel,
        "hardware": {"gpu": GPU, "count": COUNT},
    }


OPTIMIZERS: tuple[Data, ...] = (
    *({"name": "adamw", "copies": 4},) * 4,
    *({"name": "adamw", "implementation": "foreach", "copies": 4},) * 2,
    {"name": "sgd", "copies": 2},
    {"name": "sgd", "momentum": 0.9, "copies": 3},
    {"name": "adafactor", "copies": 2},
    {"name": "adamw8bit", "copies": 3},
    {"name": "muon", "copies": 3},
)
"""``copies``: bytes of weights, gradients and state over those of the weights."""


def _weighted(chance: random.Random, weights: dict[str, int]) -> str:
    return chance.choices(list(weights), list(weights.values()))[0]


def _sizes(config: str) -> tuple[int, int, int, int, float]:
    """Return layers, hidden size, vocabulary, positions and parameters of a model of the catalog."""
    data: Data = dict(model_config(config))

    def first(*names: str) -> int:
        return next(int(data[name]) for name in names if data.get(name))

    layers, hidden = first("num_hidden_layers", "n_layer"), first("hidden_size", "n_embd")
    vocabulary, positions = first("vocab_size"), first("max_position_embeddings", "n_positions")
    row = model(config)
    published = row.published_params if row is not None else None
    params = published or 12 * layers * hidden**2 + 2 * vocabulary * hidden
    return layers, hidden, vocabulary, positions, params


def found(number: int) -> Record | None:
    """Draw recipe ``number`` until one is kept, and return its prediction."""
    wanted = STRATEGIES[number % len(STRATEGIES)]
    for strategy in dict.fromkeys((wanted, "fsdp")):
        chance = random.Random(f"{SEED} {number} {strategy}")
        for _ in range(MOST_DRAWS):
            data = drawn(chance, number, strategy)
            kept = None if data is None else _kept(data)
            if kept is not None:
                return kept
    return None


def _kept(data: Data) -> Record | None:
    try:
        record = predicted(recipe_from(data))
    except InputError:
        return None
    except Exception as error:  # A bug of ours must not end the drawing, nor stay unseen.
        say(f"failed: {data}: {type(error).__name__}: {error}", err=True)
        return None
    estimate = record.estimate
    assert estimate is not None
    low, high = (share * estimate.device_bytes for share in DEVICE_SHARES)
    is_short = (estimate.step_s or 0.0) <= LONGEST_STEP_S
    return record if low <= estimate.highest.device <= high and is_short else None


def predicted(recipe: Recipe) -> Record:
    """Return the recipe's prediction.

    Raises:
        InputError: the recipe is refused.
    """
    from trainfit.prediction.predict import predict
    from trainfit.techniques.registry import check

    check(recipe)
    return _record(recipe, estimate=predict(recipe))


def measured(recipe: Recipe, estimate: Estimate, timeout_s: float, start: Any, steps: int = STEPS) -> Record:
    """Return the recipe's measurement; what this machine refuses is a crash with the reason."""
    from trainfit.measurement.environment import host_environment
    from trainfit.measurement.run import measure

    flops: Data = {"model_flops": estimate.model_flops, "hardware_flops": estimate.hardware_flops}
    if estimate.mfu and estimate.step_s:
        flops["peak_flops_per_s"] = estimate.model_flops / estimate.step_s / estimate.mfu
    try:
        result = measure(
            recipe, steps=steps, warmup=WARMUP, device="cuda", timeout_s=timeout_s, start=start, **flops
        )
    except InputError as error:
        host, why = host_environment("cuda"), f"refused: {error}"
        result = Measurement(recipe_id=recipe.id, status="crashed", message=why, environment=host)
    return _record(recipe, measurement=result)


def _record(recipe: Recipe, **held: Any) -> Record:
    kind = "predict" if "estimate" in held else "measure"
    return Record(
        kind=kind, created_at=now(), version=installed_version("trainfit") or "", commit=commit(),
        recipe=recipe.content(), recipe_id=recipe.id, **held,
    )  # fmt: skip


def predict_all(into: Path, source: Path | None, jobs: int) -> None:
    """Predict the recipes that ``into`` lacks."""
    kept = _load(into)
    have = {one.recipe_id for one in kept}
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=without_gpu) as pool:
        if source is not None:
            recipes = [parse(Recipe, one.recipe) for one in load(source) if one.recipe_id not in have]
            records: Iterable[Record | None] = pool.map(predicted, recipes)
            count = len(recipes) + len(kept)
        else:
            # Rows are in the order of their numbers, so the rows that are there are the first ones.
            records, count = pool.map(found, range(len(kept), NUM_RECIPES)), NUM_RECIPES
        for number, record in enumerate(records, len(kept) + 1):
            if record is None:
                sys.exit(f"recipe {number}: nothing allowed was drawn")
            _append(into, record)
            say(f"[{number}/{count}] {_words(record)}")


def without_gpu() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def measure_all(source: Path, into: Path, seconds: float, steps: int) -> None:
    """Measure the recipes of ``source`` that ``into`` lacks, one after another, until the time is over."""
    from trainfit.measurement.fork_server import ready_to_fork

    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    deadline = time.monotonic() + seconds
    have = {one.recipe_id for one in _load(into)}
    rows = load(source)
    start = ready_to_fork("cuda")
    crashed: list[Record] = []
    for number, row in enumerate(rows, 1):
        if row.recipe_id in have or row.estimate is None:
            continue
        left = deadline - time.monotonic()
        if left < LEAST_S:
            say(f"stopped at recipe {number}: {left:.0f} s are left")
            return
        began = time.monotonic()
        record = measured(parse(Recipe, row.recipe), row.estimate, min(LIMIT_S, left - 5), start, steps)
        result = record.measurement
        assert result is not None
        if result.status == "timeout" and left < LIMIT_S:
            say(f"stopped at recipe {number}: its time ran out with the command's")
            return
        if result.status == "crashed":
            crashed.append(record)
            say(f"[{number}/{len(rows)}] {_words(row)}: {_errors(row, record)}")
            if len(crashed) == MOST_CRASHES:
                sys.exit("too many crashes in a row; they are not recorded")
            continue
        for one in (*crashed, record):
            _append(into, one)
        crashed.clear()
        say(f"[{number}/{len(rows)}] {time.monotonic() - began:.1f} s {_words(row)}: {_errors(row, record)}")
    for one in crashed:
        _append(into, one)


def _errors(row: Record, record: Record) -> str:
    from trainfit.report.compare import Comparison

    one, result = Comparison(parse(Recipe, row.recipe), row.estimate, record.measurement), record.measurement
    assert result is not None
    if result.status != "done":
        return f"{result.status}: {result.message}"[:300]
    names = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_device_bytes", "step_s")
    return ", ".join(f"{name} {error:+.4%}" for name in names if (error := one.error(name)) is not None)


def _words(record: Record) -> str:
    from trainfit.report.words import describe

    estimate = record.estimate
    assert estimate is not None
    share = estimate.highest.device / estimate.device_bytes
    return f"{describe(parse(Recipe, record.recipe))} ({share:.0%} of the card, {estimate.step_s or 0:.2f} s)"


def _load(path: Path) -> list[Record]:
    return load(path) if path.is_file() else []


def _append(path: Path, record: Record) -> None:
    with path.open("a", encoding="utf-8") as out:
        out.write(to_line(record) + "\n")


def main() -> None:
    """Run one of the two modes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    modes = parser.add_subparsers(dest="mode", required=True)
    predicting, measuring = map(modes.add_parser, ("predict", "measure"))
    for mode in (predicting, measuring):
        mode.add_argument("predicted", type=Path)
    measuring.add_argument("measured", type=Path)
    predicting.add_argument("--of", type=Path, help="predict the recipes of this file")
    predicting.add_argument("--jobs", type=int, default=2, help="processes")
    measuring.add_argument("--seconds", type=float, default=float("inf"), help="of the whole command")
    measuring.add_argument("--steps", type=int, default=STEPS, help="timed")
    chosen = parser.parse_args()
    if chosen.mode == "predict":
        predict_all(chosen.predicted, chosen.of, chosen.jobs)
    else:
        measure_all(chosen.predicted, chosen.measured, chosen.seconds, chosen.steps)


if __name__ == "__main__":
    main()
