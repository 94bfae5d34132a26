"""fp8 blocks: norms, residual sums and SwiGLU of a block by kernels that write fp8, forward and backward.

Of ``precision: fp8`` with the native decoder. Rounding is the same as without: one scale a tensor, from its
largest magnitude. Saved for the backward in 8 bits: SwiGLU's output. A block's input, the sum before its
second norm, the gate-up product, queries, keys, values and attention's output are saved in 16 bits, and the
backward rounds the products' inputs again. Parts of another form keep the model's code (models/fp8_block.py).
"""

import random
from functools import partial

from trainfit.catalog.families import FAMILIES
from trainfit.catalog.model_types import native_types
from trainfit.spec.recipe import Recipe
from trainfit.techniques._triton_gpus import check_device
from trainfit.techniques.base import Data, Draw, Offer, Technique, refusal
from trainfit.techniques.draft import Draft


def check(recipe: Recipe) -> None:
    """Refuse other precisions and transformers' models."""
    if recipe.precision != "fp8":
        raise refusal(
            recipe, "block_kernels", "the kernels write fp8", "use block_kernels: triton, or precision: fp8"
        )
    if recipe.model.implementation != "native":
        problem = "the kernels replace the native decoder's blocks"
        raise refusal(
            recipe, "block_kernels", problem, "use block_kernels: standard, or model.implementation: native"
        )


def apply(recipe: Recipe, draft: Draft) -> None:
    """Replace the blocks' forwards before ``precision: fp8`` looks for layers to convert."""
    from trainfit.models.fp8_block import use_fp8_blocks
    from trainfit.techniques.precision.fp8 import gains

    use_fp8_blocks(draft.model, emulated=draft.runs_on_cpu(recipe), gains=gains)


def _draw(chance: random.Random, _: Data) -> Data:
    """Draw models of Llama's form; others are refused, but only once they are built."""
    family = chance.choice([kind for kind in native_types() if kind in FAMILIES])
    model = {"implementation": "native", "config": chance.choice(FAMILIES[family])}
    compiled = chance.choice((False, "block"))
    return {"block_kernels": "fp8", "precision": "fp8", "compile": compiled, "model": model}


TECHNIQUE = Technique(
    name="fp8_block",
    order=55,
    title="fp8 blocks",
    covers={"block_kernels": ("fp8",)},
    triton={"block_kernels": ("fp8",)},
    check=check,
    check_device=partial(check_device, field="block_kernels"),
    apply=apply,
    describe=lambda recipe: "fp8 block kernels",
    needs={"precision": "fp8", "model": {"implementation": "native"}},
    draw=Draw(alone=_draw),
    offers=lambda recipe: (
        (Offer({"block_kernels": "fp8", "compile": "block"}, is_slow=True),)
        if recipe.precision == "fp8"
        else ()
    ),
)
