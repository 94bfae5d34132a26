"""Stochastic rounding: bf16 weights are rounded up or down at random, so that small updates are kept on average.

bf16 has 8 bits of precision: an update below 2^-9 of its weight is lost when rounded to nearest, and late in training
most are. Rounded at random, in proportion to what is cut off, the weight moves by the update on average. Moments that
are kept in bf16 (AdamW's, SGD's momentum) are rounded so too, because to nearest a second moment that moves by a thousandth
a step would stand still; Muon's, which moves by a twentieth each step, to nearest; Adafactor's are fp32 vectors, 8-bit
and 4-bit ones go to the nearest level. The bits follow from the recipe's seed, the weight and the step, so a resumed run
repeats itself. It is done in the optimizer's kernel. Source: Zamirai et al., arXiv:2010.06192.

Helps every run with bf16 weights and small learning rates. It costs no memory, where an fp32 master copy costs 4 bytes a
weight.

Costs a little noise in the weights, against updates that are lost without it.

Refuses nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Data, Draw, Technique


def check(recipe: Recipe) -> None:
    """The optimizer writes bf16 weights itself, in a kernel of ours."""
    field, asked = "optimizer.stochastic_rounding", recipe.optimizer
    if recipe.precision not in ("bf16", "fp8"):
        raise InputError(
            f"precision {recipe.precision} has fp32 weights, which lose nothing",
            "use precision: bf16 or fp8",
            field=field,
            value=True,
        )
    if asked.implementation != "fused":
        raise InputError(
            f"{asked.name}'s {asked.implementation} implementation rounds to nearest",
            "use optimizer.implementation: fused",
            field=field,
            value=True,
        )
    if recipe.adapter is not None and recipe.adapter.dtype == "fp32":
        raise InputError(
            "only the adapter trains, and its weights are fp32, which lose nothing",
            "use adapter.dtype: base, or set stochastic_rounding: false",
            field=field,
            value=True,
        )


def seeds(recipe: Recipe) -> Iterator[int]:
    """One for each optimizer that a step has (one a parameter, when they run in backward), never equal."""
    seed = recipe.seed
    while True:
        seed += 104_729
        yield seed % 2**63


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
    fields=("optimizer.stochastic_rounding",),
    covers={"optimizer.stochastic_rounding": (True,)},
    check=check,
    describe=lambda recipe: "stochastic rounding",
    examples=({"optimizer": {"stochastic_rounding": True}},),
    draw=Draw(alone=_draw),
)
