"""Adafactor: the second moment as one row and one column per matrix (Shazeer and Stern, arXiv:1804.04235).

Without momentum: ``torch.optim.Adafactor``. With momentum (the paper's beta1, a whole fp32 first moment):
``transformers.optimization.Adafactor`` with ``relative_step=False`` and ``scale_parameter=True``, so that
its learning rate means what torch's means. Both scale the learning rate by the weight's root mean square
and clip the update at 1; their epsilons and weight decay differ. ``implementation: fused`` is trainfit's
(optim/adafactor.py): torch's function in fp32, without scratch of a weight's size and without waiting for
the host. The default is ``forloop``, as in torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Draw, Technique
from trainfit.techniques.draft import Draft
from trainfit.techniques.optimizer.adamw import describe_optimizer
from trainfit.techniques.optimizer.stochastic_rounding import seeds

if TYPE_CHECKING:
    import torch
    from torch import nn


def check(recipe: Recipe) -> None:
    """Refuse momentum with an implementation other than ``forloop``."""
    options = recipe.optimizer
    if options.momentum and options.implementation != "forloop":
        raise InputError(
            "Adafactor with momentum runs as a plain loop",
            "use forloop or leave it out, or set optimizer.momentum: 0",
            field="optimizer.implementation",
            value=options.implementation,
        )


def apply(recipe: Recipe, draft: Draft) -> None:
    """Set torch's Adafactor, trainfit's (fused) or transformers' (with momentum)."""
    options = recipe.optimizer
    if options.implementation == "fused":
        draft.make_optimizer = _fused(recipe)
        return
    if options.momentum:
        from transformers.optimization import Adafactor

        draft.make_optimizer = lambda parameters: Adafactor(
            parameters,
            lr=options.lr,
            weight_decay=options.weight_decay,
            beta1=options.momentum,
            relative_step=False,
        )
        return
    import torch

    draft.make_optimizer = lambda parameters: torch.optim.Adafactor(
        parameters,
        lr=options.lr,
        weight_decay=options.weight_decay,
        foreach=options.implementation == "foreach",
    )


def _fused(recipe: Recipe) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    from trainfit.optim.adafactor import FusedAdafactor

    options, numbers = recipe.optimizer, seeds(recipe)
    return lambda parameters: FusedAdafactor(
        parameters,
        lr=options.lr,
        weight_decay=options.weight_decay,
        stochastic=options.stochastic_rounding,
        seed=next(numbers),
    )


TECHNIQUE = Technique(
    name="adafactor",
    order=270,
    title="Adafactor",
    fields=("optimizer.name", "optimizer.implementation", "optimizer.momentum"),
    covers={"optimizer.name": ("adafactor",)},
    check=check,
    apply=apply,
    describe=describe_optimizer,
    variants=(
        {"optimizer": {"name": "adafactor", "implementation": "foreach", "momentum": 0.0}},
        {"optimizer": {"name": "adafactor", "implementation": "foreach", "momentum": 0.9}},
        {"optimizer": {"name": "adafactor", "implementation": "fused", "momentum": 0.0}},
        {"optimizer": {"name": "adafactor", "implementation": "fused", "momentum": 0.9}},
    ),
    examples=(
        {"optimizer": {"name": "adafactor"}},
        {"optimizer": {"name": "adafactor", "implementation": "fused"}},
    ),
    draw=Draw(
        alone=lambda chance, _: {"optimizer": {"name": "adafactor", "implementation": "fused"}},
        weights={"optimizer.name": {"adafactor": 2}},
        options=lambda chance: {"momentum": chance.choice((0.0, 0.0, 0.9))},
    ),
)
