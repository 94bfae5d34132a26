"""AdamW with 8-bit or 4-bit moments: 2.03 or 1.06 bytes a weight for both.

Dettmers et al., arXiv:2110.02861; Li et al., arXiv:2309.01507. States equal those of torchao's AdamW8bit and
AdamW4bit (optim/adamw.py).
"""

from trainfit.spec.hardware import Gpu
from trainfit.spec.recipe import Recipe
from trainfit.techniques._triton_gpus import refuse_older
from trainfit.techniques.base import Draw, Offer, OptimizerFacts, StateKind, Technique, refusal
from trainfit.techniques.draft import Draft
from trainfit.techniques.optimizer.adamw import (
    OPTIMIZER_FIELDS,
    STATE,
    describe_optimizer,
    in_words,
    refuse_momentum,
    smaller_state,
)
from trainfit.techniques.optimizer.stochastic_rounding import seeded, seeds

BITS = {"adamw8bit": 8, "adamw4bit": 4}
CODED: dict[str, StateKind] = {
    "step": "number",
    "exp_avg_codes": "codes", "exp_avg_scales": "scales",
    "exp_avg_sq_codes": "codes", "exp_avg_sq_scales": "scales",
}  # fmt: skip
"""State of weights that are large enough for low bits."""


def _moments(recipe: Recipe, _: float = 0.0) -> tuple[float, ...]:
    return (BITS[recipe.optimizer.name] / 8,) * 2


def check(recipe: Recipe) -> None:
    """Refuse momentum and other implementations than ``fused``."""
    refuse_momentum(recipe)
    if recipe.optimizer.implementation != "fused":
        problem, remedy = f"{recipe.optimizer.name} is one kernel a weight", "use fused or leave it out"
        raise refusal(recipe, "optimizer.implementation", problem, remedy)


def check_gpu(recipe: Recipe, gpu: Gpu) -> None:
    """Refuse a GPU that cannot run the kernel."""
    refuse_older(recipe, gpu, "optimizer.name", "use optimizer.name: bnb-adamw8bit")


def apply(recipe: Recipe, draft: Draft) -> None:
    """Set AdamW; all instances share the table of levels."""
    from trainfit.kernels.quantize.codebook import MomentLevels
    from trainfit.optim.adamw import FusedAdamW

    options = recipe.optimizer
    draft.make_optimizer = seeded(
        seeds(recipe),
        FusedAdamW,
        lr=options.lr,
        weight_decay=options.weight_decay,
        levels=MomentLevels(BITS[options.name], draft.device),
        stochastic=options.stochastic_rounding,
    )


TECHNIQUE = Technique(
    name="adamw_low_bit",
    order=250,
    title="8-bit and 4-bit AdamW",
    fields=OPTIMIZER_FIELDS,
    covers={"optimizer.name": tuple(BITS)},
    check_gpu=check_gpu,
    check=check,
    apply=apply,
    describe=describe_optimizer,
    variants=({"optimizer": {"name": "adamw4bit", "implementation": "forloop"}},),
    examples=({"optimizer": {"name": "adamw8bit"}}, {"optimizer": {"name": "adamw4bit"}}),
    draw=Draw(alone=lambda chance, _: {"optimizer": {"name": chance.choice(tuple(BITS))}}),
    offers=lambda recipe: (
        Offer({"optimizer": {"name": name}}, smaller_state(recipe, name), numerics=f"moments in {bits} bits")
        for name, bits in BITS.items()
    ),
    optimizer=OptimizerFacts(
        moments=_moments,
        states=(STATE, CODED),
        sharded_by=("fsdp",),
        describe=lambda recipe, _: in_words(f"{BITS[recipe.optimizer.name]}-bit AdamW", _moments(recipe)),
    ),
)
