"""Fused gradient accumulation: the product of a weight's gradient adds to the sum of the micro-batches.

Saved: a kernel for each weight and micro-batch that reads two gradients and writes one, and the memory of
the second. The sum is rounded once for each micro-batch, instead of the product and the sum apart.
"""

import random

from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Data, Draw, Expected, Offer, Technique, refusal
from trainfit.techniques.draft import Draft
from trainfit.techniques.precision import fp8_scaling

FIELD = "accumulation"
REMEDY = "use accumulation: standard"
PRECISIONS = ("fp32", "bf16", "bf16-master", "fp16-master", "fp16-pure")
"""Those whose products have the dtype of weights and gradients; fp8's are apart."""


def check(recipe: Recipe) -> None:
    """Refuse recipes without a sum, and those whose gradients are not the products' alone."""
    if recipe.batch.accumulate == 1:
        problem = "with one micro-batch a step there is nothing to add to"
        raise refusal(recipe, FIELD, problem, f"set batch.accumulate, or {REMEDY}")
    if recipe.precision == "fp8":
        if recipe.block_kernels != "fp8" and recipe.fp8_weights == "each-use":
            problem = "torchao's fp8 layers give autograd each micro-batch's gradient"
            raise refusal(recipe, FIELD, problem, f"{REMEDY}, or fp8_weights: scales")
    elif recipe.precision not in PRECISIONS:
        problem = f"{recipe.precision} multiplies in another dtype than that of the gradients"
        raise refusal(recipe, FIELD, problem, f"{REMEDY}, or precision: bf16 or bf16-master")
    if recipe.hardware.count > 1:
        problem = "gradients of several ranks are reduced by hooks that a sum within the product passes by"
        raise refusal(recipe, FIELD, problem, f"{REMEDY}, or hardware.count: 1")
    if recipe.adapter is not None:
        raise refusal(recipe, FIELD, "the base's weights have no gradients", REMEDY)
    if recipe.offload.weights or recipe.offload.activations:
        problem = "offload would move the kept gradients to the host"
        raise refusal(recipe, FIELD, problem, f"{REMEDY}, or offload.weights and .activations: false")


def apply(recipe: Recipe, draft: Draft) -> None:
    """Replace the blocks' linear layers before they are compiled; zero the gradients after each update."""
    from trainfit.models.kept_gradients import keep_gradients

    kept = keep_gradients(draft.model, recomputed=recipe.recompute != "none")
    draft.before_batch.append(kept.begin_batch)
    draft.after_step.append(kept.end_step)


def _draw(chance: random.Random, recipe: Data) -> Data:
    """Draw two or more micro-batches."""
    batch = recipe["batch"] | {"accumulate": chance.choice((2, 3, 4))}
    return {FIELD: "fused", "precision": chance.choice(PRECISIONS[:3]), "batch": batch}


def _offers(recipe: Recipe) -> tuple[Offer, ...]:
    """Offer it, in fp8 together with the kernels whose layers it is for, and with their kinds of scaling.

    The planner takes of offers that set the same field only one.
    """
    expected = Expected(time=0.97)
    if recipe.precision != "fp8":
        return (Offer({FIELD: "fused"}, expected),)
    fields: Data = {FIELD: "fused", **fp8_scaling.KERNELS}
    delayed = fields | {fp8_scaling.FIELD: "delayed"}
    return (
        Offer(fields, expected, is_slow=True),
        Offer(delayed, expected, numerics=fp8_scaling.NUMERICS, is_slow=True),
    )


TECHNIQUE = Technique(
    name="fused_accumulation",
    order=68,
    title="Fused gradient accumulation",
    covers={FIELD: ("fused",)},
    check=check,
    apply=apply,
    describe=lambda recipe: "fused accumulation",
    needs={"batch": {"micro": 1, "accumulate": 4}},
    draw=Draw(alone=_draw),
    offers=_offers,
)
