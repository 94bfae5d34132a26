"""Delayed scaling: SwiGLU's output and gradient are rounded by the largest magnitude of the step before.

Of ``block_kernels: fp8``. The kernel that rounds notes the largest magnitude for the next step, so that none
has to look for it first (Micikevicius et al., arXiv:2209.05433, section 4; Transformer Engine's delayed
scaling with a history of one step and a margin of one bit). What is larger than twice that of the step before
becomes the largest code. The first step measures. 8 bytes a tensor are kept, in checkpoints too. Other
operands are measured as before.
"""

import random

from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Data, Draw, Offer, Technique, refusal
from trainfit.techniques.draft import Draft
from trainfit.techniques.precision import fp8_block

FIELD = "fp8_scaling"
REMEDY = "use fp8_scaling: dynamic"
KERNELS: Data = {"block_kernels": "fp8", "compile": "block"}
"""The fields that an offer of delayed scaling sets too."""
NUMERICS = "SwiGLU rounded by the step before's largest magnitudes"


def check(recipe: Recipe) -> None:
    """Refuse recipes whose kernels measure first, and several ranks, whose magnitudes would differ."""
    if recipe.block_kernels != "fp8":
        problem = "only the kernels of block_kernels: fp8 note the largest magnitudes"
        raise refusal(recipe, FIELD, problem, f"{REMEDY}, or block_kernels: fp8")
    if recipe.hardware.count > 1:
        problem = "each rank of several GPUs would round by its own largest magnitude"
        raise refusal(recipe, FIELD, problem, f"{REMEDY}, or hardware.count: 1")
    if recipe.objective.name != "pretrain":
        problem = f"{recipe.objective.name} runs the model between updates, whose magnitudes differ"
        raise refusal(recipe, FIELD, problem, f"{REMEDY}, or objective.name: pretrain")


def apply(recipe: Recipe, draft: Draft) -> None:
    """Let the feed-forward parts of fp8 blocks note magnitudes; a checkpoint holds them."""
    from trainfit.models.fp8_block import Histories

    histories = Histories(draft.model)
    draft.carried |= histories.tensors
    draft.after_step.append(histories.end_step)


def _draw(chance: random.Random, recipe: Data) -> Data:
    drawn = fp8_block.TECHNIQUE.draw.alone
    assert drawn is not None
    return {**drawn(chance, recipe), FIELD: "delayed"}


TECHNIQUE = Technique(
    name="fp8_scaling",
    order=56,
    title="Delayed scaling",
    covers={FIELD: ("delayed",)},
    check=check,
    apply=apply,
    describe=lambda recipe: "delayed scaling",
    needs={"precision": "fp8", "block_kernels": "fp8", "model": {"implementation": "native"}},
    draw=Draw(alone=_draw),
    offers=lambda recipe: (
        (Offer({FIELD: "delayed", **KERNELS}, numerics=NUMERICS, is_slow=True),)
        if recipe.precision == "fp8"
        else ()
    ),
)
