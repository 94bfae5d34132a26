"""Optimizer in backward: each weight is updated as soon as its gradient is there, and the gradient is freed.

One optimizer a parameter, stepped by a hook, so backward never holds more than a few gradients at once. The update
is the ordinary one. Source: https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe
from trainfit.techniques.draft import Draft

if TYPE_CHECKING:
    import torch
    from torch import nn

COVERS = {"optimizer.in_backward": (True,)}


def applies(recipe: Recipe) -> bool:
    return bool(recipe.optimizer.in_backward)


def check(recipe: Recipe) -> None:
    """The update must be able to run after every backward, on each gradient alone."""
    field = "optimizer.in_backward"
    if recipe.batch.accumulate > 1:
        raise InputError(
            "gradients are used up in each backward, so none accumulate",
            "set batch.accumulate: 1 or optimizer.in_backward: false",
            field=field,
            value=True,
        )
    if recipe.precision == "amp-fp16":
        raise InputError(
            "amp-fp16's scaler must see every gradient before any update",
            "use precision: amp-bf16 or optimizer.in_backward: false",
            field=field,
            value=True,
        )


def apply(recipe: Recipe, draft: Draft) -> None:
    """A hook on every trainable weight that steps its optimizer and drops its gradient."""
    assert draft.make_optimizer is not None, "step.ORDER has the optimizers before optimizer_in_backward"
    for parameter in draft.trainable():
        optimizer = draft.make_optimizer([parameter])
        parameter.register_post_accumulate_grad_hook(_updating(optimizer))
        draft.optimizers.append(optimizer)
    draft.steps_in_backward = True


def _updating(optimizer: torch.optim.Optimizer):
    def update(parameter: nn.Parameter) -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update
