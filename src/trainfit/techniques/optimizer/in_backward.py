"""Optimizer in backward: update weights as soon as their gradients are complete, and free the gradients.

``true``: one optimizer per weight. ``block``: one per decoder block, run when the block's last gradient is
complete; weights outside the blocks are updated one by one. Source:
https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Draw, Expected, Offer, Technique, refusal
from trainfit.techniques.draft import Draft

if TYPE_CHECKING:
    import torch
    from torch import nn


def check(recipe: Recipe) -> None:
    """Refuse fields that need gradients after the backward."""
    if recipe.batch.accumulate > 1:
        problem = "each backward frees its gradients; accumulating them instead would save no memory"
        remedy = "set batch.accumulate: 1 or optimizer.in_backward: false"
        raise refusal(recipe, "optimizer.in_backward", problem, remedy)
    if recipe.scales_loss:
        problem = f"{recipe.precision}'s scaler must see every gradient before any update"
        of_bf16 = {"amp-fp16": "amp-bf16", "fp16-master": "bf16-master"}.get(recipe.precision, "bf16")
        remedy = f"use precision: {of_bf16} or optimizer.in_backward: false"
        raise refusal(recipe, "optimizer.in_backward", problem, remedy)


def apply(recipe: Recipe, draft: Draft) -> None:
    """Register hooks that update a weight, or a block's weights, when the last gradient is complete."""
    if recipe.optimizer.in_backward == "block":
        blocks, others = draft.trainable_by_block()
        groups = [*blocks, *([parameter] for parameter in others)]
    else:
        groups = [[parameter] for parameter in draft.trainable()]
    updates = [_Update(group, draft.optimizers_for(group)) for group in groups]
    draft.optimizers = [optimizer for update in updates for optimizer in update.optimizers]
    draft.steps_in_backward = True

    @contextmanager
    def none_left_over() -> Iterator[None]:
        yield
        for update in updates:
            if update.num_arrived and draft.hosted is not None:
                problem = (
                    "the backward did not reach every weight of a block before it moved back to the host"
                )
                raise refusal(recipe, "optimizer.in_backward", problem, "use optimizer.in_backward: true")
            if update.num_arrived:  # A backward did not reach all of them (an expert that no token chose).
                update.run()

    draft.around_backward.append(none_left_over)


class _Update:
    """Parameters that are updated together, when the last of their gradients is complete.

    Their hooks refer weakly to it: the garbage collector does not see a parameter's hooks, and a cycle
    through them would keep the model's memory.
    """

    def __init__(self, parameters: list[nn.Parameter], optimizers: list[torch.optim.Optimizer]):
        self.optimizers, self.num_arrived, self._num_parameters = optimizers, 0, len(parameters)
        weak = weakref.ref(self)

        def arrived(_: torch.Tensor) -> None:
            if (update := weak()) is not None:
                update.arrived()

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(arrived)

    def arrived(self) -> None:
        """Count a gradient, and update with the last one."""
        self.num_arrived += 1
        if self.num_arrived == self._num_parameters:
            self.run()

    def run(self) -> None:
        self.num_arrived = 0
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def _describe(recipe: Recipe) -> str:
    return "optimizer in backward" + (" by block" if recipe.optimizer.in_backward == "block" else "")


def expected(recipe: Recipe) -> Expected:
    """Return the expected effect of freeing gradients in the backward."""
    return Expected() if recipe.optimizer.in_backward else Expected(gradients=0.1)


TECHNIQUE = Technique(
    name="optimizer_in_backward",
    order=300,
    title="Optimizer in backward",
    covers={"optimizer.in_backward": (True, "block")},
    check=check,
    apply=apply,
    describe=_describe,
    variants=({"optimizer": {"in_backward": "block"}},),
    draw=Draw(
        alone=lambda chance, _: {"optimizer": {"in_backward": "block"}, "batch": {"accumulate": 1}},
        weights={"optimizer.in_backward": {True: 1}},
        share=0.2,
    ),
    offers=lambda recipe: (Offer({"optimizer": {"in_backward": "block"}}, expected(recipe)),),
)
