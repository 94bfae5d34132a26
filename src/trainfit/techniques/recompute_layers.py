"""Recomputation and offload decided for every decoder block by itself: ``recompute: {layers: [...]}``.

What the planner makes of a budget (``recompute: {budget_gib: x}``), and what can be written by hand.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from trainfit.spec.errors import InputError
from trainfit.spec.recipe import BudgetGib, Layers, Recipe
from trainfit.techniques.draft import Draft

if TYPE_CHECKING:
    from torch import nn

COVERS = {"recompute": ("layers", "budget_gib")}


def applies(recipe: Recipe) -> bool:
    return isinstance(recipe.recompute, Layers | BudgetGib)


def check(recipe: Recipe) -> None:
    """The budget must be planned by now; what sorts operations needs them one by one."""
    if isinstance(recipe.recompute, BudgetGib):
        raise InputError(
            "a budget is planned before a step is built",
            "use trainfit predict, measure or train, which plan it, or write out recompute: {layers: [...]}",
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
    from trainfit.models.layers import layer_lists
    from trainfit.virtual.repeat import TOLD

    blocks = [block for _, found in layer_lists(model) for block in found]
    planned = recipe.recompute.blocks()
    if len(planned) != len(blocks):
        raise InputError(
            f"it says what {len(planned)} blocks do, the model has {len(blocks)}",
            "write one entry a block, or {recompute: ..., count: n} for n of them",
            field="recompute.layers",
            value=[run.count for run in recipe.recompute.layers],
        )
    for block, run in zip(blocks, planned, strict=True):
        setattr(block, TOLD, f"{run.recompute} {run.offload}")


def apply(recipe: Recipe, draft: Draft) -> None:
    """Give each block the forward that its mark names."""
    from trainfit.models.layers import layer_lists
    from trainfit.virtual.repeat import TOLD

    blocks = [block for _, found in layer_lists(draft.model) for block in found]
    if not all(hasattr(block, TOLD) for block in blocks):
        name_blocks(recipe, draft.model)
    for block in blocks:
        level = getattr(block, TOLD).partition(" ")[0]
        if level != "none":
            block.__class__ = _recomputed(type(block), level)


@cache
def _recomputed(block: type[nn.Module], level: str) -> type[nn.Module]:
    """The block's class with a forward that keeps less.

    One class for all, not a function set on each block: equal blocks stay equal.
    """
    import torch
    from torch.utils._pytree import tree_leaves
    from torch.utils.checkpoint import checkpoint

    from trainfit.techniques.rematerialize import Saving

    def full(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(block.forward, self, *args, use_reentrant=False, **kwargs)

    def elementwise(self: nn.Module, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return block.forward(self, x, *args, **kwargs)
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        with Saving(x, [*given, *self.parameters(), *self.buffers()], lambda expression, t: None):
            return block.forward(self, x, *args, **kwargs)

    forward = {"full": full, "elementwise": elementwise}[level]
    return type(f"Recomputed{level.title()}{block.__name__}", (block,), {"forward": forward})
