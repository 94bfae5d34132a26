"""Stochastic rounding: bf16 weights are rounded up or down at random, so small updates survive on average.

Zamirai et al., arXiv:2010.06192. The optimizer's kernel rounds; bf16 moments of AdamW and SGD are rounded so
too, Muon's and low-bit moments to nearest.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

from trainfit.spec.hardware import Gpu
from trainfit.spec.recipe import Recipe
from trainfit.techniques._triton_gpus import refuse_older
from trainfit.techniques.base import Data, Draw, Technique, refusal


def check(recipe: Recipe) -> None:
    """Refuse fp32 weights, and implementations that round to nearest."""
    field, options = "optimizer.stochastic_rounding", recipe.optimizer
    if recipe.precision == "fp16-pure":
        raise refusal(recipe, field, "the kernels round to bf16 alone", "use precision: bf16")
    if recipe.precision not in ("bf16", "fp8"):
        kind = "fp32 master" if recipe.precision in ("bf16-master", "fp16-master") else "fp32"
        problem = f"precision {recipe.precision} has {kind} weights, which lose no update to rounding"
        raise refusal(recipe, field, problem, "use precision: bf16 or fp8")
    if options.implementation != "fused":
        problem = f"{options.name}'s {options.implementation} implementation rounds to nearest"
        raise refusal(recipe, field, problem, "use optimizer.implementation: fused")
    if recipe.adapter is not None and recipe.adapter.dtype == "fp32":
        problem = "only the adapter trains, and its fp32 weights lose no update to rounding"
        raise refusal(recipe, field, problem, "use adapter.dtype: base, or set stochastic_rounding: false")


def check_gpu(recipe: Recipe, gpu: Gpu) -> None:
    """Refuse a GPU that cannot run the kernels, which round to bf16."""
    refuse_older(recipe, gpu, "optimizer.stochastic_rounding", "use precision: amp-fp16 and leave it out")


def seeds(recipe: Recipe) -> Iterator[int]:
    """Yield a different seed for each optimizer of a step (one per parameter when they run in backward)."""
    seed = recipe.seed
    while True:
        seed += 104_729
        yield seed % 2**63


def seeded(numbers: Iterator[int], optimizer: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """Return a function that makes optimizers for some parameters, each with the next of ``seeds``."""
    return lambda parameters: optimizer(parameters, seed=next(numbers), **settings)


def _draw(chance: random.Random, _: Data) -> Data:
    name = chance.choice(("adamw", "adamw", "adafactor", "sgd", "adamw8bit", "muon"))
    optimizer: Data = {"name": name, "stochastic_rounding": True}
    if name != "muon":
        optimizer["implementation"] = "fused"
    return {"precision": "bf16", "optimizer": optimizer}


TECHNIQUE = Technique(
    name="stochastic_rounding",
    order=290,
    title="Stochastic rounding",
    covers={"optimizer.stochastic_rounding": (True,)},
    check_gpu=check_gpu,
    check=check,
    describe=lambda recipe: "stochastic rounding",
    draw=Draw(alone=_draw),
)
