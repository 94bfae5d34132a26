"""Gradient accumulation: k micro-batches, each loss divided by k, then one update.

With equally many labels in every micro-batch (as in our batches) the gradients add up to those of one batch k times
as large. Gradients live through all but the first forward, which is what it costs in memory.

Helps where the batch that the optimizer should see does not fit: activations are those of one micro-batch. With small
micro-batches kernels are small too, and the step is slower than one large batch that fits.

Costs no quality, up to rounding: the k gradients are added in their own dtype, which in bf16 has 8 bits.

Refuses nothing.
"""

from __future__ import annotations

from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Draw, Technique
from trainfit.techniques.draft import Draft


def apply(recipe: Recipe, draft: Draft) -> None:
    """The step's loop takes this many micro-batches and divides each loss by it."""
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
