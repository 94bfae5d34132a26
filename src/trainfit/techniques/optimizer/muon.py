"""Muon: the update of each hidden matrix is its orthogonalised momentum.

Source: https://kellerjordan.github.io/posts/muon/. ``torch.optim.Muon`` for the two-dimensional weights of
the decoder blocks, AdamW for everything else: embeddings, head, norms, biases, stacked experts. Updates are
scaled to the size of AdamW's (Liu et al., arXiv:2502.16982; ``match_rms_adamw``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Draw, OptimizerFacts, Technique, refusal
from trainfit.techniques.draft import Draft, in_groups
from trainfit.techniques.optimizer.adamw import OPTIMIZER_FIELDS, STATE, adamw, describe_optimizer, in_words
from trainfit.techniques.optimizer.stochastic_rounding import seeded, seeds

if TYPE_CHECKING:
    import torch
    from torch import nn


def check(recipe: Recipe) -> None:
    """Refuse Muon without momentum: its update is the orthogonalised momentum."""
    if not recipe.optimizer.momentum:
        remedy = "leave it out for 0.95, or write another"
        raise refusal(recipe, "optimizer.momentum", "Muon needs a momentum above 0", remedy)


def apply(recipe: Recipe, draft: Draft) -> None:
    """Set two kinds of optimizers, each with its own parameters."""
    blocks, _ = draft.trainable_by_block()
    hidden = {id(parameter) for block in blocks for parameter in block if parameter.dim() == 2}
    if not hidden:
        problem = "no matrix of this model's blocks is trained"
        raise refusal(recipe, "optimizer.name", problem, "use optimizer.name: adamw")
    numbers = seeds(recipe)
    for_matrices, for_others = _muon(recipe, numbers), adamw(recipe, numbers)

    def make(parameters: list[Any]) -> torch.optim.Optimizer:
        return (for_matrices if id(in_groups(parameters)[0]) in hidden else for_others)(parameters)

    def kinds(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        return [[p for p in parameters if (id(p) in hidden) is matrix] for matrix in (True, False)]

    draft.make_optimizer, draft.kinds = make, kinds


def _muon(recipe: Recipe, numbers: Iterator[int]) -> Callable[..., Any]:
    import torch

    options = recipe.optimizer
    settings: dict[str, Any] = {
        "lr": options.lr,
        "weight_decay": options.weight_decay,
        "momentum": options.momentum,
    }
    settings["adjust_lr_fn"] = "match_rms_adamw"
    if not options.stochastic_rounding:
        return partial(torch.optim.Muon, **settings)
    from trainfit.optim.stochastic import StochasticMuon

    return seeded(numbers, StochasticMuon, **settings)


def _describe_state(recipe: Recipe, weight: float) -> str:
    elsewhere = in_words("AdamW", (weight, weight))
    return f"{in_words('Muon', (weight,), 'momentum')} (blocks' matrices; {elsewhere} elsewhere)"


TECHNIQUE = Technique(
    name="muon",
    order=280,
    title="Muon",
    fields=OPTIMIZER_FIELDS,
    covers={"optimizer.name": ("muon",)},
    check=check,
    apply=apply,
    describe=describe_optimizer,
    variants=({"optimizer": {"name": "muon", "momentum": 0.0}},),
    draw=Draw(alone=lambda chance, _: {"optimizer": {"name": "muon"}}),
    optimizer=OptimizerFacts(
        moments=lambda recipe, weight: (weight,),  # Of the blocks' matrices
        states=(
            {"momentum_buffer": "weight"},
            {"step": "number", "momentum_buffer": "weight"},
            STATE,
        ),
        describe=_describe_state,
    ),
)
