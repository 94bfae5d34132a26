"""Block kernels: RMSNorm, SwiGLU and rotary embedding by one Triton kernel each, forward and backward.

Saved for backward: of a norm its input and one number a row, of silu(gate) * up the two factors, of a
rotation nothing of its size. Models are recognised by their code, not their names.
"""

import random
from functools import partial

from trainfit.catalog.families import FAMILIES
from trainfit.catalog.model_types import native_types
from trainfit.spec.recipe import Recipe
from trainfit.techniques._triton_gpus import check_device
from trainfit.techniques.base import Data, Draw, Expected, Offer, Technique
from trainfit.techniques.draft import Draft


def apply(recipe: Recipe, draft: Draft) -> None:
    """Replace the forwards of norms, feed-forward parts and attentions; refuse a model of another form."""
    from trainfit.models.block_kernels import use_block_kernels

    use_block_kernels(draft.model)


def _draw(chance: random.Random, recipe: Data) -> Data:
    """Draw models of Llama's form; others are refused, but only once they are built."""
    drawn: Data = {"block_kernels": "triton"}
    if recipe["model"]["implementation"] == "hf":
        family = chance.choice([kind for kind in native_types() if kind in FAMILIES])
        drawn["model"] = {"config": chance.choice(FAMILIES[family])}
    return drawn


TECHNIQUE = Technique(
    name="block_kernels",
    order=10,
    title="Block kernels",
    covers={"block_kernels": ("triton",)},
    triton={"block_kernels": ("triton",)},
    check_device=partial(check_device, field="block_kernels"),
    apply=apply,
    describe=lambda recipe: "block kernels",
    draw=Draw(alone=_draw),
    offers=lambda recipe: (
        Offer({"block_kernels": "triton"}, Expected(activations=0.7, time=0.9), is_start=True),
    ),
)
