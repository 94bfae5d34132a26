"""Recomputation and offload decided for every decoder block by itself: ``recompute: {layers: [...]}``.

What the planner makes of a budget (``recompute: {budget_gib: x}``), and what can be written by hand: each block recomputes
nothing, its elementwise work or everything, and a share of what it keeps can wait in pinned host memory. How a budget
becomes a plan: docs/results/recompute-budget.md.

Helps where the card is known: a plan spends exactly the memory that is there, and recomputes no more than it must.

Costs no quality: gradients are equal bit for bit.

Refuses a plan that does not name every block, and models whose blocks write in place into what their backward computes again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe
from trainfit.spec.recompute import BudgetGib, Layers
from trainfit.techniques.base import Draft

if TYPE_CHECKING:
    from torch import nn

NAME = "recompute_layers"
COVERS = {"recompute": ("layers", "budget_gib")}


def applies(recipe: Recipe) -> bool:
    return isinstance(recipe.recompute, Layers | BudgetGib)


def check(recipe: Recipe) -> None:
    """The budget must be planned by now; what sorts operations needs them one by one."""
    if isinstance(recipe.recompute, BudgetGib):
        raise InputError(
            "a budget is planned before a step is built",
            "plan it with trainfit.planning.recompute.resolve, as the commands do, or write out recompute: {layers: [...]}",
            field="recompute.budget_gib",
            value=recipe.recompute.budget_gib,
        )
    assert isinstance(recipe.recompute, Layers)
    if recipe.compile and any(
        run.recompute == "elementwise" or run.offload for run in recipe.recompute.layers
    ):
        raise InputError(
            "compiled code has no single operations to keep, recompute or offload",
            "use full and none in the layers, recompute: {budget: share}, or compile: false",
            field="recompute.layers",
            value=recipe.recompute.model_dump()["layers"],
        )


def name_blocks(recipe: Recipe, model: nn.Module) -> None:
    """Write on every block what it is to do, before any is cut out of a model that is only traced.

    Raises:
        InputError: the plan is for another number of blocks.
    """
    if not isinstance(recipe.recompute, Layers):
        return
    from trainfit.models.layers import decoder_blocks
    from trainfit.virtual.trace.repeated_layers import BLOCK_CONFIG

    blocks = decoder_blocks(model)
    planned = recipe.recompute.blocks()
    if len(planned) != len(blocks):
        raise InputError(
            f"the entries speak of {len(planned)} in all, and the model has {len(blocks)} blocks",
            "write one entry a block, or {recompute: ..., count: n} for n of them",
            field="recompute.layers",
            value=[f"{run.count} {run.recompute}" for run in recipe.recompute.layers],
        )
    # The last block's backward comes next: there is no time to take anything away.
    planned[-1] = planned[-1].model_copy(update={"offload": 0.0})
    for block, run in zip(blocks, planned, strict=True):
        setattr(block, BLOCK_CONFIG, f"{run.recompute} {run.offload}")


def least_period(recipe: Recipe) -> int:
    """Over how many blocks what one of them saves reaches: a fully recomputed block's input is the one's before it, and
    leaves while the one after it runs."""
    if not isinstance(recipe.recompute, Layers):
        return 1
    return 2 if any(run.recompute == "full" and run.offload for run in recipe.recompute.layers) else 1


def apply(recipe: Recipe, draft: Draft) -> None:
    """Give each block the forward that it was told."""
    from trainfit.checkpointing.per_block import PerBlockSaving
    from trainfit.checkpointing.selective import set_recompute
    from trainfit.models.layers import decoder_blocks
    from trainfit.virtual.trace.repeated_layers import BLOCK_CONFIG

    blocks = decoder_blocks(draft.model)
    if not all(hasattr(block, BLOCK_CONFIG) for block in blocks):
        name_blocks(recipe, draft.model)
    told = [getattr(block, BLOCK_CONFIG).split() for block in blocks]
    if recipe.compile:
        # A block that knew its number would be compiled by itself.
        for block, (level, _) in zip(blocks, told, strict=True):
            if level == "full":
                set_recompute(block, "full")
        return
    PerBlockSaving(blocks, draft.device, [(level, float(share)) for level, share in told]).install()
