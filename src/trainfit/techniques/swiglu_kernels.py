"""SwiGLU kernels: silu(gate) * up by one Triton kernel forward, one backward; the rest by the model's code.

Of use in compiled blocks: Inductor writes both halves of the gradient by one kernel that computes each half
for every element, and takes 1.6 times as long, but fuses norms with the sums before them, unlike
``block_kernels: triton``. ``swiglu-rope`` also splits and rotates queries, keys and values in one kernel; the
compiler writes its gradient in the same way. Saved for backward: gate and up.
"""

import random
from functools import partial

from trainfit.catalog.families import FAMILIES
from trainfit.catalog.model_types import native_types
from trainfit.spec.recipe import Recipe
from trainfit.techniques._triton_gpus import check_device
from trainfit.techniques.base import Data, Draw, Offer, Technique
from trainfit.techniques.draft import Draft


def apply(recipe: Recipe, draft: Draft) -> None:
    """Replace the forwards of feed-forward parts, and of attention; refuse those of another form."""
    from trainfit.models.block_kernels import use_split_kernels, use_swiglu_kernels

    use = use_split_kernels if recipe.block_kernels == "swiglu-rope" else use_swiglu_kernels
    use(draft.model)


def _draw(chance: random.Random, _: Data) -> Data:
    """Draw models of Llama's form; others are refused, but only once they are built."""
    family = chance.choice([kind for kind in native_types() if kind in FAMILIES])
    code, compiled = chance.choice(("hf", "native")), chance.choice((False, "block"))
    model = {"implementation": code, "config": chance.choice(FAMILIES[family])}
    return {"block_kernels": "swiglu", "compile": compiled, "model": model}


def _offers(recipe: Recipe) -> tuple[Offer, ...]:
    """Offer both kernels in compiled blocks; of fp8 those of whole blocks are offered instead."""
    fields: Data = {"block_kernels": "swiglu-rope", "compile": "block"}
    return () if recipe.precision == "fp8" else (Offer(fields, is_slow=True, speeds_up="rest"),)


TECHNIQUE = Technique(
    name="swiglu_kernels",
    order=11,
    title="SwiGLU kernels",
    covers={"block_kernels": ("swiglu", "swiglu-rope")},
    triton={"block_kernels": ("swiglu", "swiglu-rope")},
    check_device=partial(check_device, field="block_kernels"),
    apply=apply,
    describe=lambda recipe: f"{recipe.block_kernels} kernels",
    draw=Draw(alone=_draw),
    offers=_offers,
)
