"""AdamW with moments of 8 or 4 bits: 2.03 or 1.06 bytes a weight for both, where fp32 weights' take 8.

Each block of 256 (8 bits) or 128 (4 bits) neighbours shares a scale, and each moment is the nearest of 256 or 16 levels
times it (Dettmers et al., arXiv:2110.02861; Li et al., arXiv:2309.01507). Tensors of fewer than 4,096 elements, such as
norms, keep fp32 moments. The function and the states are those of torchao's AdamW8bit and AdamW4bit (a test compares their
codes), run by a kernel of ours (optim/adamw.py): torchao compiles its step anew for each shape and holds two fp32 copies
of the weight while it runs, ours allocates nothing and is compiled once.

Helps where moments are the largest part of the peak: many weights, little text in a batch, or recomputed activations.

Costs what rounding the moments costs; both papers report results equal to 32-bit AdamW's on their tasks.

Refuses nothing.
"""

from __future__ import annotations

from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Draw, Technique
from trainfit.techniques.draft import Draft
from trainfit.techniques.optimizer.adamw import describe_optimizer, refuse_momentum
from trainfit.techniques.optimizer.stochastic_rounding import seeds

BITS = {"adamw8bit": 8, "adamw4bit": 4}


def check(recipe: Recipe) -> None:
    """One kernel a weight, which keeps its own two moments."""
    refuse_momentum(recipe)
    if recipe.optimizer.implementation != "fused":
        raise InputError(
            f"{recipe.optimizer.name} is one kernel a weight",
            "use fused or leave it out",
            field="optimizer.implementation",
            value=recipe.optimizer.implementation,
        )


def apply(recipe: Recipe, draft: Draft) -> None:
    """One AdamW; all that are made share the table of levels."""
    from trainfit.kernels.quantize.codebook import MomentLevels
    from trainfit.optim.adamw import FusedAdamW

    asked = recipe.optimizer
    levels, numbers = MomentLevels(BITS[asked.name], draft.device), seeds(recipe)
    draft.make_optimizer = lambda parameters: FusedAdamW(
        parameters,
        asked.lr,
        asked.weight_decay,
        levels=levels,
        stochastic=asked.stochastic_rounding,
        seed=next(numbers),
    )


TECHNIQUE = Technique(
    name="adamw_low_bit",
    order=250,
    title="8-bit and 4-bit AdamW",
    fields=("optimizer.name", "optimizer.implementation", "optimizer.momentum"),
    covers={"optimizer.name": tuple(BITS)},
    check=check,
    apply=apply,
    describe=describe_optimizer,
    variants=({"optimizer": {"name": "adamw4bit", "implementation": "forloop"}},),
    examples=({"optimizer": {"name": "adamw8bit"}}, {"optimizer": {"name": "adamw4bit"}}),
    draw=Draw(alone=lambda chance, _: {"optimizer": {"name": chance.choice(tuple(BITS))}}),
)
