"""Quantised frozen base: the decoder blocks' linear weights in 4 or 8 bits, with a trainable adapter.

Layers are quantised while the model is built, block by block (models/quantized.py). On ``native`` the codes
are those of the weights that the seed gives unquantised.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Data, Draw, Expected, Offer, Technique, refusal
from trainfit.techniques.precision import fp8

if TYPE_CHECKING:
    from trainfit.spec.hardware import Gpu
    from trainfit.techniques.draft import Draft

FIELD = "quantize.compute"


def check(recipe: Recipe) -> None:
    """Refuse fields that need the unquantised weights."""
    if recipe.precision == "fp8":
        problem = "fp8 products quantise whole weights at each step, and these are stored quantised"
        raise refusal(recipe, "quantize", problem, "use precision: bf16 with quantize: fp8")
    library = recipe.base.library if recipe.base is not None else "trainfit"
    if recipe.compile and library != "trainfit":
        problem = f"torch.compile of {library}'s 4-bit layers is not modelled"
        raise refusal(recipe, "compile", problem, "use compile: false, or leave quantize.library out")


def check_gpu(recipe: Recipe, gpu: Gpu) -> None:
    """Refuse products in fp8 on GPUs without fp8 tensor cores."""
    if _multiplies_in_fp8(recipe):
        fp8.check_gpu_of(recipe, gpu, FIELD, "leave quantize.compute out")


def check_device(recipe: Recipe, device_type: str) -> None:
    """Refuse products in fp8 on a real GPU without fp8 tensor cores; a CPU emulates them."""
    if _multiplies_in_fp8(recipe):
        fp8.check_device_of(recipe, device_type, FIELD, "leave quantize.compute out")


def apply(recipe: Recipe, draft: Draft) -> None:
    """Choose what multiplies codes in fp8; refuse layers whose sizes its kernels do not take."""
    from trainfit.models.quantized_linear import QuantizedLinear

    if not _multiplies_in_fp8(recipe):
        return
    multiple = fp8.MULTIPLE * recipe.mesh.tensor
    for name, module in draft.model.named_modules():
        if isinstance(module, QuantizedLinear):
            module.emulates_fp8 = draft.runs_on_cpu(recipe)
            if any(size % multiple for size in module.shape):
                problem = (
                    f"sizes of fp8 products are multiples of {multiple} here, and {name} is {module.shape}"
                )
                raise refusal(
                    recipe, FIELD, problem, "leave it out, or name the layer in quantize.skip_modules"
                )


def _multiplies_in_fp8(recipe: Recipe) -> bool:
    return recipe.base is not None and recipe.base.compute == "fp8"


def _draw(chance: random.Random, _: Data) -> Data:
    adapter = {"kind": "lora", "rank": chance.choice((8, 16, 64)), "dtype": chance.choice(("fp32", "base"))}
    return {"quantize": chance.choice(("nf4", "nf4", "int8", "fp8")), "adapter": adapter, "precision": "bf16"}


def _offers(recipe: Recipe) -> tuple[Offer, ...]:
    if recipe.adapter is None:
        return ()
    bits = {"nf4": "4-bit", "int8": "8-bit", "fp8": "8-bit"}
    small = Expected(weights=0.3)
    offers = [Offer({"quantize": name}, small, numerics=f"{bits[name]} base") for name in bits]
    in_fp8 = {"kind": "fp8", "compute": "fp8"}
    if not _multiplies_in_fp8(recipe):
        offers.append(Offer({"quantize": in_fp8}, small, numerics="8-bit base, products in fp8"))
    return tuple(offers)


TECHNIQUE = Technique(
    name="quantize",
    order=20,
    title="Quantised base",
    covers={"quantize": ("nf4", "int8", "fp8")},
    check=check,
    check_gpu=check_gpu,
    check_device=check_device,
    apply=apply,
    describe=lambda recipe: f"{recipe.quantize} base",
    variants=(
        {"quantize": "int8"},
        {"quantize": "fp8"},
        {"quantize": {"kind": "fp8", "compute": "fp8"}},
        {"quantize": "nf4", "adapter": {"kind": "lora", "dtype": "base"}},
    ),
    needs={"adapter": {"kind": "lora"}},
    draw=Draw(alone=_draw),
    offers=_offers,
)
