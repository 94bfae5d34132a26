"""Muon: the update of each hidden matrix is its orthogonalised momentum.

Source: https://kellerjordan.github.io/posts/muon/. ``torch.optim.Muon`` for the two-dimensional weights of
the decoder blocks, AdamW for everything else: embeddings, head, norms, biases, stacked experts. Updates are
scaled to the size of AdamW's (Liu et al., arXiv:2502.16982; ``match_rms_adamw``), so one learning rate and
weight decay serve both. The five Newton-Schulz steps count as hardware FLOPs, not as model FLOPs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Draw, Technique
from trainfit.techniques.draft import Draft
from trainfit.techniques.optimizer.adamw import adamw, describe_optimizer
from trainfit.techniques.optimizer.stochastic_rounding import seeds

if TYPE_CHECKING:
    import torch
    from torch import nn


def check(recipe: Recipe) -> None:
    """Refuse Muon without momentum: its update is the orthogonalised momentum."""
    if not recipe.optimizer.momentum:
        raise InputError(
            "Muon works on a momentum",
            "leave it out for 0.95, or write another",
            field="optimizer.momentum",
            value=recipe.optimizer.momentum,
        )


def apply(recipe: Recipe, draft: Draft) -> None:
    """Set two kinds of optimizers, each with its own parameters."""
    blocks, _ = draft.trainable_by_block()
    hidden = {id(parameter) for block in blocks for parameter in block if parameter.dim() == 2}
    if not hidden:
        raise InputError(
            "no hidden matrices train in this model",
            "use optimizer.name: adamw",
            field="optimizer.name",
            value="muon",
        )
    numbers = seeds(recipe)
    for_others = adamw(recipe, numbers)

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        if id(parameters[0]) not in hidden:
            return for_others(parameters)
        return _muon(recipe, parameters, next(numbers))

    def kinds(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        return [[p for p in parameters if (id(p) in hidden) is matrix] for matrix in (True, False)]

    draft.make_optimizer, draft.kinds = make, kinds


def _muon(recipe: Recipe, parameters: list[nn.Parameter], seed: int) -> torch.optim.Optimizer:
    import torch

    options = recipe.optimizer
    settings = {
        "lr": options.lr,
        "weight_decay": options.weight_decay,
        "momentum": options.momentum,
        "adjust_lr_fn": "match_rms_adamw",
    }
    if not options.stochastic_rounding:
        return torch.optim.Muon(parameters, **settings)
    from trainfit.optim.stochastic import StochasticMuon

    return StochasticMuon(parameters, seed=seed, **settings)


TECHNIQUE = Technique(
    name="muon",
    order=280,
    title="Muon",
    fields=("optimizer.name", "optimizer.implementation", "optimizer.momentum"),
    covers={"optimizer.name": ("muon",)},
    check=check,
    apply=apply,
    describe=describe_optimizer,
    variants=({"optimizer": {"name": "muon", "momentum": 0.0}},),
    examples=({"optimizer": {"name": "muon"}},),
    draw=Draw(alone=lambda chance, _: {"optimizer": {"name": "muon"}}),
)
