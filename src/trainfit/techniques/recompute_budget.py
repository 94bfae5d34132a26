"""Recomputation by torch.compile's own choice, within a share of what it would keep: the activation memory budget.

1 keeps what compiled code keeps anyway, 0 only the compiled region's inputs; between them the partitioner solves a knapsack:
which results to compute again so that the bytes handed from forward to backward stay within the share, for the fewest
FLOPs (``torch._functorch.config.activation_memory_budget``, pytorch/pytorch#126320). The same partitioner runs when a step
is predicted. Its objective is not the peak: what the backward holds while it computes results again is not in it, so less
budget can mean more memory, and published budgets are not monotonic.

Helps compiled models that do not fit by little.

Costs no quality but the rounding of another fusion.

Refuses nothing.
"""

from __future__ import annotations

from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Budget, Recipe
from trainfit.techniques.draft import Draft

COVERS = {"recompute": ("budget",)}


def applies(recipe: Recipe) -> bool:
    return isinstance(recipe.recompute, Budget)


def check(recipe: Recipe) -> None:
    """Only the compiler can spend the budget."""
    assert isinstance(recipe.recompute, Budget)
    if not recipe.compile:
        raise InputError(
            "only compiled code has a budget to keep to",
            "set compile: model (or block), or use recompute: selective, {every: 2} or {budget_gib: x}",
            field="recompute.budget",
            value=recipe.recompute.budget,
        )


def apply(recipe: Recipe, draft: Draft) -> None:
    """Set the budget while the forward runs, and with it compiles: forward and backward are parted then."""
    assert isinstance(recipe.recompute, Budget)
    from torch._functorch import config

    budget = recipe.recompute.budget
    draft.around_forward.append(lambda: config.patch(activation_memory_budget=budget))
