"""SGD: ``torch.optim.SGD``, with one momentum buffer of each weight's dtype where the recipe sets momentum.

With stochastic rounding it is trainfit's (optim/stochastic.py). On a CPU, ``fused`` updates 16-bit weights by
``forloop``, because torch's fused CPU kernel leaves them unchanged
(https://github.com/pytorch/pytorch/issues/191763).
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Data, Draw, OptimizerFacts, Technique
from trainfit.techniques.draft import Draft, in_groups
from trainfit.techniques.optimizer.adamw import OPTIMIZER_FIELDS, describe_optimizer, in_words
from trainfit.techniques.optimizer.stochastic_rounding import seeded, seeds

if TYPE_CHECKING:
    import torch


def apply(recipe: Recipe, draft: Draft) -> None:
    """Set SGD with an explicit implementation, because torch's default depends on the device."""
    import torch

    options = recipe.optimizer
    common: dict[str, Any] = {
        "lr": options.lr,
        "weight_decay": options.weight_decay,
        "momentum": options.momentum,
    }
    if options.stochastic_rounding:
        from trainfit.optim.stochastic import StochasticSGD

        draft.make_optimizer = seeded(seeds(recipe), StochasticSGD, **common)
        return
    on_cpu, foreach = draft.runs_on_cpu(recipe), options.implementation == "foreach"

    def make(parameters: list[Any]) -> torch.optim.Optimizer:
        is_16_bit = any(parameter.dtype.itemsize == 2 for parameter in in_groups(parameters))
        fused = options.implementation == "fused" and not (on_cpu and is_16_bit)
        optimizer = torch.optim.SGD(parameters, foreach=foreach, fused=fused, **common)
        if fused and options.momentum:
            optimizer.register_step_pre_hook(lambda *_: _begin_momentum(optimizer))
        return optimizer

    draft.make_optimizer = make


def _begin_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Give each new gradient a momentum of zeros.

    torch's fused SGD begins with uninitialised memory, which its kernel fills in the first update. Where a
    GradScaler skips that update the next one reads the uninitialised memory. torch's fused SGD also fails
    where only some momenta exist (a weight without a gradient in the first step).
    """
    import torch

    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if parameter.grad is not None and state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(parameter.grad)


def _moments(recipe: Recipe, weight: float) -> tuple[float, ...]:
    return (weight,) if recipe.optimizer.momentum else ()


def _options(chance: random.Random) -> Data:
    return {"momentum": chance.choice((0.0, 0.9)), "implementation": chance.choice(("foreach", "fused"))}


TECHNIQUE = Technique(
    name="sgd",
    order=260,
    title="SGD",
    fields=OPTIMIZER_FIELDS,
    covers={"optimizer.name": ("sgd",)},
    apply=apply,
    describe=describe_optimizer,
    variants=({"optimizer": {"name": "sgd", "implementation": "foreach"}},),
    draw=Draw(weights={"optimizer.name": {"sgd": 2}}, options=_options),
    optimizer=OptimizerFacts(
        moments=_moments,
        states=(
            {"step": "number"},
            {"momentum_buffer": "weight"},
            {"step": "number", "momentum_buffer": "weight"},
        ),
        sharded_by=("fsdp", "expert_parallel"),
        describe=lambda recipe, weight: in_words("SGD", _moments(recipe, weight), "momentum"),
    ),
)
