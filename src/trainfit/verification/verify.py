"""Predict and measure a small suite of recipes, drawn by a seed, on this machine's device.

Recipes are drawn as for the truth suite (evidence/scripts/accuracy/truth_suite.py), smaller and quicker ones,
one of each model family before a family repeats.
"""

import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import median
from typing import Any

from trainfit.catalog.families import FAMILIES
from trainfit.catalog.load import model_config
from trainfit.measurement.run import measure
from trainfit.spec.errors import InputError
from trainfit.spec.hardware import Gpu
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.recipe import Recipe
from trainfit.spec.result import Estimate, Measurement, WhichPeak
from trainfit.spec.value import Value
from trainfit.verification.draws import allowed, draw

LIMIT = 0.02  # Largest median error of the allocated peak that passes
LARGEST_SHARE, LONGEST_STEP_S = 0.9, 1.5
"""Largest predicted share of the card's memory, and longest predicted step, of a drawn recipe."""
MOST_DRAWS = 60  # Most draws for one recipe: on a small card many are too large
QUANTITIES = {
    "allocated": "peak_allocated_bytes",
    "reserved": "peak_reserved_bytes",
    "device": "peak_device_bytes",
}
TINY = ("tiny-llama-demo", "gpt2", "pythia-70m", "opt-125m", "smollm-135m")
"""Models for a CPU, with two layers and a small vocabulary."""
ADAMW = {"name": "adamw", "implementation": "foreach"}
TINY_OPTIMIZERS = (
    ADAMW, ADAMW | {"implementation": "forloop"}, ADAMW | {"name": "sgd", "momentum": 0.9},
)  # fmt: skip

Say = Callable[[str], None]
Pair = tuple[Recipe, Estimate]


class Check(Value):
    """One recipe, predicted and measured: bytes and errors by quantity (allocated, reserved, device)."""

    recipe_id: str
    recipe: dict[str, Any]
    status: str  # done, out-of-memory, timeout, crashed; refused: this machine cannot run it
    message: str = ""
    predicted: dict[str, int]  # Of two possible peaks the one that was measured
    measured: dict[str, int]
    peak_met: WhichPeak | None = None  # Which of two predicted peaks that is; None: one was predicted
    errors: dict[str, float]  # (predicted - measured) / measured, if both are known


class Verification(Value):
    """Result of a suite."""

    gpu: str
    device: str
    seed: int
    limit: float = LIMIT
    checks: tuple[Check, ...]
    medians: dict[str, float]  # Median size of the errors, by quantity
    worst: dict[str, float]  # The largest error, signed, by quantity
    passed: bool
    """True if the allocated peak's median error is within the limit and nothing ran out of memory."""


def verify(
    gpu: Gpu, device: str, *, count: int, seed: int, timeout_s: float = 300.0,
    say: Say = lambda line: None, keep: Callable[[Recipe, Estimate, Measurement], None] = lambda *_: None,
) -> Verification:  # fmt: skip
    """Draw, predict and measure ``count`` recipes, one after another.

    Args:
        gpu: the catalog's row of this machine's GPU, or of its CPU.
        device: the device's own name.
        timeout_s: limit of one measurement.
        say: called with each line of progress.
        keep: called with each recipe and both results.

    Raises:
        InputError: the virtual GPU does not know this GPU, or too few recipes fit it.
    """
    on_cpu = gpu.vendor == "host"
    if not on_cpu:
        from trainfit.virtual.cuda.scratch import GpuTraits

        GpuTraits.of(gpu)
    checks: list[Check] = []
    where = "cpu" if on_cpu else "cuda"
    for recipe, estimate in suite(gpu, count, seed, say):
        number = f"[{len(checks) + 1}/{count}]"
        say(f"{number} measuring {recipe.model.display_name}, recipe {recipe.id}")
        try:
            measured = measure(recipe, steps=0, warmup=2, device=where, timeout_s=timeout_s)
        except InputError as error:
            checks.append(_check(recipe, estimate, None, str(error), on_cpu))
        else:
            keep(recipe, estimate, measured)
            checks.append(_check(recipe, estimate, measured, measured.message, on_cpu))
        say(f"{number} {outcome(checks[-1])}")
    return conclude(gpu.name, device, seed, tuple(checks))


def suite(gpu: Gpu, count: int, seed: int, say: Say = lambda line: None) -> Iterator[Pair]:
    """Yield ``count`` different recipes with their predictions, the same for the same arguments and code."""
    chance, on_cpu = random.Random(seed), gpu.vendor == "host"
    num_families = len(TINY if on_cpu else FAMILIES)
    found: set[str] = set()
    families: set[str] = set()
    # In its own process torch, and what a model's code changes, stay out of this one.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_without_gpu) as pool:
        for _ in range(MOST_DRAWS * count):
            if len(found) == count:
                return
            family, data = _draw_tiny(chance) if on_cpu else _draw(chance, gpu.name)
            if family in families:
                continue
            pair = pool.submit(_fitting, data).result()
            if pair is None or pair[0].id in found:
                continue
            found.add(pair[0].id)
            families = families | {family} if len(families) + 1 < num_families else set()
            say(f"[{len(found)}/{count}] predicted {pair[0].model.display_name}, recipe {pair[0].id}")
            yield pair
    if len(found) < count:
        problem = f"only {len(found)} of {count} recipes that were drawn fit {gpu.title}"
        remedy = f"use --count {max(1, len(found))}, or another --seed"
        raise InputError(problem, remedy, field="count", value=count)


def _without_gpu() -> None:
    """Hide the GPU: autograd's engine would make a context, half a GiB, on the card to be measured."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _draw(chance: random.Random, gpu: str) -> tuple[str, dict[str, Any]]:
    data = draw(chance, gpu, 0.0)
    native, config = data["model"]["implementation"] == "native", data["model"]["config"]
    return next(name for name in FAMILIES if config in FAMILIES[name] and (name == "native") == native), data


def _draw_tiny(chance: random.Random) -> tuple[str, dict[str, Any]]:
    """Draw a recipe with two layers, a small vocabulary and short sequences."""
    name = chance.choice(TINY)
    config = dict(model_config(name))
    layers = next(key for key in ("num_hidden_layers", "n_layer") if key in config)
    optimizer = chance.choice(TINY_OPTIMIZERS)
    batch = {"micro": (1, 2, 4), "seq": (64, 128, 200), "accumulate": (1, 1, 2)}
    return name, {
        "model": {"config": config | {layers: 2, "vocab_size": 4096}},
        "batch": {field: chance.choice(values) for field, values in batch.items()},
        "precision": chance.choice(("fp32", "bf16")),
        "recompute": chance.choice(("none", "none", "full")),
        "optimizer": optimizer,
        "hardware": {"gpu": "cpu"},
    }


def _fitting(data: dict[str, Any]) -> Pair | None:
    """Return the recipe and its prediction if it is allowed, fits the card and has a short step."""
    if data["hardware"]["gpu"] == "cpu":
        from trainfit.prediction.predict import predict

        recipe = recipe_from(data)
        return recipe, predict(recipe)
    kept = allowed(data)
    if kept is None:
        return None
    _, estimate = kept
    fits = estimate.highest.device <= LARGEST_SHARE * estimate.device_bytes
    return kept if fits and (estimate.step_s or 0.0) <= LONGEST_STEP_S else None


def _check(
    recipe: Recipe, estimate: Estimate, measured: Measurement | None, message: str, on_cpu: bool
) -> Check:
    # A CPU has no caching allocator, and a process's memory there is mostly not the step's.
    names = ["allocated"] if on_cpu else list(QUANTITIES)
    known = {name: getattr(measured, QUANTITIES[name], None) for name in names}
    bytes_measured = {name: size for name, size in known.items() if size}
    met = estimate.met(**{name: size for name, size in bytes_measured.items() if name != "device"})
    predicted = {name: getattr(estimate.with_peak(met), QUANTITIES[name]) for name in names}
    status = "refused" if measured is None else measured.status
    errors = {name: (predicted[name] - size) / size for name, size in bytes_measured.items()}
    return Check(
        recipe_id=recipe.id, recipe=recipe.content(), status=status, message=message, predicted=predicted,
        measured=bytes_measured, peak_met=met, errors=errors if status == "done" else {},
    )  # fmt: skip


def conclude(gpu: str, device: str, seed: int, checks: tuple[Check, ...]) -> Verification:
    """Return medians, worst errors and the verdict. Nothing compared is not passed."""
    errors = {name: [check.errors[name] for check in checks if name in check.errors] for name in QUANTITIES}
    medians = {name: median(map(abs, values)) for name, values in errors.items() if values}
    fits = all(check.status != "out-of-memory" for check in checks)
    return Verification(
        gpu=gpu,
        device=device,
        seed=seed,
        checks=checks,
        medians=medians,
        worst={name: max(values, key=abs) for name, values in errors.items() if values},
        passed=fits and medians.get("allocated", LIMIT + 1) <= LIMIT,
    )


def outcome(check: Check) -> str:
    """Return one line: the status, or the errors."""
    if not check.errors:
        return f"{check.status}: {(check.message or 'no memory was measured').splitlines()[0]}"
    errors = ", ".join(f"{name} {error:+.2%}" for name, error in check.errors.items())
    return errors if check.peak_met is None else f"{errors} (the {check.peak_met} one of two peaks)"
