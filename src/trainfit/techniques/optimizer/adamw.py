"""AdamW: ``torch.optim.AdamW`` (Loshchilov and Hutter, arXiv:1711.05101), two moments of each weight's dtype.

``fused`` is one kernel for many weights and allocates nothing; ``foreach`` holds intermediates of all
weights' size while it runs, ``forloop`` of one weight's. With stochastic rounding it is trainfit's
(optim/adamw.py): weights and moments in bf16.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Data, Draw, Technique
from trainfit.techniques.draft import Draft
from trainfit.techniques.optimizer.stochastic_rounding import seeds

if TYPE_CHECKING:
    import torch
    from torch import nn


def check(recipe: Recipe) -> None:
    """Refuse momentum, which AdamW always has."""
    refuse_momentum(recipe)


def refuse_momentum(recipe: Recipe) -> None:
    """Refuse momentum, for every AdamW.

    Raises:
        InputError: the recipe sets a momentum.
    """
    if recipe.optimizer.momentum:
        raise InputError(
            "AdamW always keeps a first moment (beta 0.9)",
            "remove it, or use optimizer.name: sgd or adafactor",
            field="optimizer.momentum",
            value=recipe.optimizer.momentum,
        )


def apply(recipe: Recipe, draft: Draft) -> None:
    """Set AdamW with an explicit implementation, because torch's default depends on the device."""
    draft.make_optimizer = adamw(recipe)


def adamw(
    recipe: Recipe, numbers: Iterator[int] | None = None
) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """Return a function that makes the recipe's AdamW for some parameters.

    Args:
        numbers: seeds of stochastic rounding, shared with other optimizers.
    """
    import torch

    options = recipe.optimizer
    if not options.stochastic_rounding:
        return lambda parameters: torch.optim.AdamW(
            parameters,
            lr=options.lr,
            weight_decay=options.weight_decay,
            foreach=options.implementation == "foreach",
            fused=options.implementation == "fused",
        )
    from trainfit.optim.adamw import FusedAdamW

    numbers = numbers or seeds(recipe)
    return lambda parameters: FusedAdamW(
        parameters, options.lr, options.weight_decay, stochastic=True, seed=next(numbers)
    )


def describe_optimizer(recipe: Recipe) -> str:
    """Return the optimizer's name, implementation and momentum."""
    optimizer = recipe.optimizer
    momentum = f" momentum {optimizer.momentum:g}" if optimizer.momentum else ""
    return f"{optimizer.name} {optimizer.implementation}{momentum}"


def _describe(recipe: Recipe) -> str:
    return "" if recipe.optimizer.implementation == "fused" else describe_optimizer(recipe)


def _options(chance: random.Random) -> Data:
    return {"implementation": chance.choice(("fused", "foreach", "forloop"))}


TECHNIQUE = Technique(
    name="adamw",
    order=240,
    title="AdamW",
    fields=("optimizer.name", "optimizer.implementation", "optimizer.momentum"),
    covers={"optimizer.name": ("adamw",)},
    check=check,
    apply=apply,
    describe=_describe,
    variants=(
        {"optimizer": {"name": "adamw", "implementation": "fused"}},
        {"optimizer": {"name": "adamw", "implementation": "forloop"}},
    ),
    examples=({"optimizer": {"implementation": "foreach"}},),
    draw=Draw(weights={"optimizer.name": {"adamw": 5}}, options=_options),
)
