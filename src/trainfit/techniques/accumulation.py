"""Gradient accumulation: k micro-batches, each loss divided by k, then one update.

All micro-batches have equally many labels, so the gradients add up to those of one batch k times as large.
"""

from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Draw, Technique
from trainfit.techniques.draft import Draft


def apply(recipe: Recipe, draft: Draft) -> None:
    """Set the number of micro-batches, by which the step divides each loss."""
    draft.num_micro_batches = recipe.batch.accumulate


TECHNIQUE = Technique(
    name="accumulation",
    order=210,
    title="Gradient accumulation",
    fields=("batch.micro", "batch.accumulate"),
    apply=apply,
    when=lambda recipe: recipe.batch.accumulate > 1,
    examples=({"batch": {"micro": 1, "accumulate": 4}},),
    draw=Draw(weights={"batch.accumulate": {1: 4, 2: 1, 4: 1}}),
)
