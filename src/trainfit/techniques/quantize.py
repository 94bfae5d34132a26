"""Quantised frozen base: the decoder blocks' linear weights in 4 or 8 bits, with a trainable adapter.

Layers are quantised while the model is built, block by block (models/quantized.py). On ``native`` the codes
are those of the weights that the seed gives unquantised.
"""

import random

from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Data, Draw, Expected, Offer, Technique, refusal


def check(recipe: Recipe) -> None:
    """Refuse fields that need the unquantised weights."""
    if recipe.precision == "fp8":
        problem = "fp8 products quantise whole weights at each step, and these are stored quantised"
        raise refusal(recipe, "quantize", problem, "use precision: bf16 with quantize: fp8")
    library = recipe.base.library if recipe.base is not None else "trainfit"
    if recipe.compile and library != "trainfit":
        problem = f"torch.compile of {library}'s 4-bit layers is not modelled"
        raise refusal(recipe, "compile", problem, "use compile: false, or leave quantize.library out")


def _draw(chance: random.Random, _: Data) -> Data:
    adapter = {"kind": "lora", "rank": chance.choice((8, 16, 64)), "dtype": chance.choice(("fp32", "base"))}
    return {"quantize": chance.choice(("nf4", "nf4", "int8", "fp8")), "adapter": adapter, "precision": "bf16"}


def _offers(recipe: Recipe) -> tuple[Offer, ...]:
    if recipe.adapter is None:
        return ()
    bits = {"nf4": "4-bit", "int8": "8-bit", "fp8": "8-bit"}
    small = Expected(weights=0.3)
    return tuple(Offer({"quantize": name}, small, numerics=f"{bits[name]} base") for name in bits)


TECHNIQUE = Technique(
    name="quantize",
    order=20,
    title="Quantised base",
    covers={"quantize": ("nf4", "int8", "fp8")},
    check=check,
    describe=lambda recipe: f"{recipe.quantize} base",
    variants=(
        {"quantize": "int8"},
        {"quantize": "fp8"},
        {"quantize": "nf4", "adapter": {"kind": "lora", "dtype": "base"}},
    ),
    needs={"adapter": {"kind": "lora"}},
    draw=Draw(alone=_draw),
    offers=_offers,
)
