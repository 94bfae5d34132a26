"""Quantised frozen base: the decoder blocks' linear weights in 4 or 8 bits, an adapter trains beside them.

``nf4`` is QLoRA's storage (Dettmers et al., https://arxiv.org/abs/2305.14314): 4.127 bits a weight, 16 levels, blocks of 64,
their scales in 8 bits; the format and its values are bitsandbytes'. ``int8`` and ``fp8`` (e4m3, a storage format here: products
run in the recipe's precision) have one fp32 scale an output row. Each product makes its weight anew in the precision of the
recipe, forward and backward, so one layer's 16-bit weight is there at a time. The layers are made so where the model is
built (models/quantized.py), block by block, so a 70B base never needs more than its codes and one block; embeddings, head,
norms and biases stay whole. On ``native`` the codes are those of the weights that the seed gives unquantised.

Helps where the frozen base itself is what does not fit beside an adapter. The price in speed is one pass over the weights
for each product.

Costs what rounding the base costs: ``int8`` little, ``nf4`` more; the QLoRA paper reports that training the adapter makes
up for it on its tasks.

Refuses mixtures of experts and state-space models, whose blocks hold weights that are no linear layer's.
"""

from __future__ import annotations

import random

from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Data, Draw, Technique


def check(recipe: Recipe) -> None:
    """The spec asks for an adapter; what else computes with the weights' own values cannot."""
    if recipe.precision == "fp8":
        raise InputError(
            "fp8 products quantise whole weights at each step, and these are stored quantised",
            "use precision: bf16 with quantize: fp8",
            field="quantize",
            value=recipe.quantize,
        )
    if recipe.parallel.world_size > 1:
        raise InputError(
            "codes are not shared out over GPUs yet",
            "use one GPU, or quantize: null",
            field="quantize",
            value=recipe.quantize,
        )


def _draw(chance: random.Random, _: Data) -> Data:
    adapter = {"kind": "lora", "rank": chance.choice((8, 16, 64)), "dtype": chance.choice(("fp32", "base"))}
    return {"quantize": chance.choice(("nf4", "nf4", "int8", "fp8")), "adapter": adapter, "precision": "bf16"}


TECHNIQUE = Technique(
    name="quantize",
    order=20,
    title="Quantised base",
    fields=("quantize",),
    covers={"quantize": ("nf4", "int8", "fp8")},
    check=check,
    describe=lambda recipe: f"{recipe.quantize} base",
    variants=(
        {"quantize": "int8"},
        {"quantize": "fp8"},
        {"quantize": "nf4", "adapter": {"kind": "lora", "dtype": "base"}},
    ),
    examples=({"quantize": "nf4"},),
    needs={"adapter": {"kind": "lora"}},
    draw=Draw(alone=_draw),
)
