"""fp8 weights: what rounding a weight takes is computed once a step, not in each forward and backward.

Of ``precision: fp8``. ``scales``: the largest magnitude, so that each use reads the weight once instead of
twice. ``codes``: rounded once; each backward transposes the codes. ``both-layouts``: rounded and transposed
once. Kept are 4 bytes a weight, and one or two bytes a parameter of the converted layers. On a GPU, ``codes``
and ``both-layouts`` multiply by the scale's inverse where ``scales`` divides, so that about one value in four
million gets the code beside it.
"""

import random
from functools import partial

from trainfit.catalog.families import FAMILIES
from trainfit.catalog.model_types import native_types
from trainfit.spec.recipe import Recipe
from trainfit.techniques._triton_gpus import check_device
from trainfit.techniques.base import Data, Draw, Offer, Technique, refusal
from trainfit.techniques.draft import Draft

FIELD = "fp8_weights"
REMEDY = "use fp8_weights: each-use"
KINDS = ("scales", "codes", "both-layouts")


def check(recipe: Recipe) -> None:
    """Refuse what changes weights otherwise than by an update at the end of a step, or shares them out."""
    if recipe.precision != "fp8":
        problem = f"precision {recipe.precision} rounds no weights to fp8"
        raise refusal(recipe, FIELD, problem, f"{REMEDY}, or precision: fp8")
    if recipe.hardware.count > 1:
        problem = "the ranks of several GPUs share out or gather weights, of which nothing is kept"
        raise refusal(recipe, FIELD, problem, f"{REMEDY}, or hardware.count: 1")
    if recipe.optimizer.in_backward:
        problem = "an optimizer in the backward changes weights before the step ends"
        raise refusal(recipe, FIELD, problem, f"{REMEDY}, or optimizer.in_backward: false")
    if recipe.objective.name != "pretrain":
        problem = f"{recipe.objective.name} runs the model with other weights between updates"
        raise refusal(recipe, FIELD, problem, f"{REMEDY}, or objective.name: pretrain")


def apply(recipe: Recipe, draft: Draft) -> None:
    """Replace the blocks' linear layers before torchao converts them; compute what is kept after updates."""
    from torch import nn

    from trainfit.models.fp8_block import HeldLinear
    from trainfit.models.fp8_weights import keep_weights
    from trainfit.models.layers import require_blocks
    from trainfit.techniques.precision.fp8 import gains

    modules = [
        module
        for block in require_blocks(draft.model, FIELD, recipe.fp8_weights, REMEDY)
        for module in block.modules()
        if isinstance(module, nn.Linear)
    ]
    held = [module for module in modules if isinstance(module, HeldLinear)]
    layers = [module for module in modules if gains(module)]
    if not layers and not held:
        problem = "no layer of the decoder blocks multiplies in fp8"
        raise refusal(recipe, FIELD, problem, f"{REMEDY}, and precision: bf16")
    kind = recipe.fp8_weights
    assert kind != "each-use", "the technique covers the other values"
    kept = keep_weights(layers, held, kind, emulated=draft.runs_on_cpu(recipe))
    draft.around_forward.append(kept.refreshed)
    draft.after_step.append(kept.refresh)


def _draw(chance: random.Random, _: Data) -> Data:
    """Draw models of both kinds, native ones with fp8 blocks or without."""
    family = chance.choice([kind for kind in native_types() if kind in FAMILIES])
    implementation = chance.choice(("hf", "native", "native"))
    model = {"implementation": implementation, "config": chance.choice(FAMILIES[family])}
    kernels = chance.choice(("standard", "fp8")) if implementation == "native" else "standard"
    compiled = chance.choice((False, "block"))
    kept = {FIELD: chance.choice(KINDS), "precision": "fp8", "block_kernels": kernels}
    return {**kept, "compile": compiled, "model": model}


TECHNIQUE = Technique(
    name="fp8_weights",
    order=57,
    title="fp8 weights of a step",
    covers={FIELD: KINDS},
    triton={FIELD: ("codes", "both-layouts")},
    check=check,
    check_device=partial(check_device, field=FIELD),
    apply=apply,
    describe=lambda recipe: f"fp8 {recipe.fp8_weights.replace('-', ' ')} of weights kept",
    needs={"precision": "fp8"},
    draw=Draw(alone=_draw),
    offers=lambda recipe: tuple(Offer({FIELD: kind}) for kind in KINDS) if recipe.precision == "fp8" else (),
)
