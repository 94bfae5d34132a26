"""fp8: weights stay bf16; the decoder blocks' linear layers multiply in 8 bits through torchao.

Each operand of forward and backward is rounded by one scale a tensor, from its largest magnitude: input and
weight to e4m3, gradient to e5m2 (Micikevicius et al., arXiv:2209.05433; torchao's ``tensorwise`` recipe).
Saved for backward are the bf16 input and weight; compiled, the partitioner chooses. MFU and HFU refer to the
fp8 peak where most FLOPs are in fp8. On a CPU operands are rounded to fp8 and multiplied in fp32.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from trainfit.spec.optional import optional, require
from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Data, Draw, Offer, Technique, refusal
from trainfit.techniques.draft import Draft

if TYPE_CHECKING:
    from torch import nn

    from trainfit.spec.hardware import Gpu


MULTIPLE = 16  # Sizes of torch._scaled_mm's operands, in elements
SMALL = (4096, 1024)
"""(inputs, outputs): a layer with at most this many of both gains nothing (torchao.float8's
``_auto_filter_for_tensorwise``)."""
CAPABILITY = (8, 9)  # The least compute capability with fp8 tensor cores: Ada; Hopper is 9.0


def check_gpu(recipe: Recipe, gpu: Gpu) -> None:
    """Refuse GPUs without fp8 tensor cores."""
    check_gpu_of(recipe, gpu, "precision", "use precision: bf16 or amp-fp16")


def check_gpu_of(recipe: Recipe, gpu: Gpu, field: str, remedy: str) -> None:
    """Refuse GPUs without fp8 tensor cores, for a field that asks for products in fp8.

    Raises:
        InputError: naming the field.
    """
    capability = gpu.compute_capability
    if gpu.gfx is not None:
        problem = f"fp8 products are not modelled on {gpu.title}"
        raise refusal(recipe, field, problem, f"{remedy}, or use an NVIDIA GPU")
    if gpu.vendor != "host" and (capability is None or capability < CAPABILITY):
        problem = f"{gpu.title} has no fp8 tensor cores that torch multiplies with"
        raise refusal(recipe, field, problem, f"{remedy}, or use one from Ada or Hopper on")


def check(recipe: Recipe) -> None:
    """Refuse recipes whose layers cannot be converted."""
    require("torchao", "torchao", field="precision", value="fp8")
    if recipe.adapter is not None:
        problem = "the base is frozen under an adapter, and fp8 layers would compute its weights' gradients"
        remedy = "use precision: bf16, with quantize: fp8 to store the base in 8 bits"
        raise refusal(recipe, "precision", problem, remedy)
    if recipe.offload.weights:
        problem = "blocks with offloaded weights cannot be converted to fp8"
        raise refusal(recipe, "precision", problem, "use precision: bf16")
    if recipe.micro_sequences * recipe.batch.seq % MULTIPLE:
        remedy = f"make batch.micro x batch.seq one (now {recipe.batch.micro} x {recipe.batch.seq})"
        raise refusal(recipe, "batch.micro", f"fp8 products need a multiple of {MULTIPLE} tokens", remedy)


def check_device(recipe: Recipe, device_type: str) -> None:
    """Refuse a real GPU without fp8 tensor cores; a CPU emulates them."""
    check_device_of(recipe, device_type, "precision", "use precision: bf16 or amp-fp16")


def check_device_of(recipe: Recipe, device_type: str, field: str, remedy: str) -> None:
    """Refuse a real GPU without fp8 tensor cores, for a field that asks for products in fp8.

    Raises:
        InputError: naming the field.
    """
    if device_type != "cuda":
        return
    import torch

    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < CAPABILITY:
        problem = f"this GPU has compute capability {major}.{minor}, and fp8 products need 8.9"
        raise refusal(recipe, field, problem, remedy)


def apply(recipe: Recipe, draft: Draft) -> None:
    """Replace the blocks' linear layers by torchao's, on the same weights; refuse where none gains."""
    from trainfit.models.layers import layer_lists
    from trainfit.virtual.quiet_imports import quiet_imports

    with quiet_imports():
        float8: Any = optional("torchao.float8", "torchao", field="precision", value="fp8")

    config = float8.Float8LinearConfig(emulate=draft.runs_on_cpu(recipe))
    lists = layer_lists(draft.model)
    # By fp8 blocks (fp8_block.py), or layers of our own (fp8_weights.py)
    is_gained = recipe.block_kernels == "fp8" or recipe.fp8_weights != "each-use"
    if not is_gained and not any(gains(module) for _, blocks in lists for module in blocks.modules()):
        problem = (
            "no layer of the decoder blocks is converted: that needs a plain nn.Linear with sizes that are "
            f"multiples of {MULTIPLE}, and over {SMALL[0]} inputs or over {SMALL[1]} outputs"
        )
        remedy = "use precision: bf16, or model.implementation: native where transformers' layers differ"
        raise refusal(recipe, "precision", problem, remedy)
    for _, blocks in lists:
        float8.convert_to_float8_training(blocks, module_filter_fn=gains, config=config)


def gains(module: nn.Module, name: str = "") -> bool:
    """Return whether a layer is converted: a plain linear layer of a suitable size."""
    from torch import nn

    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        return False
    fits = module.in_features % MULTIPLE == module.out_features % MULTIPLE == 0
    return fits and (module.in_features > SMALL[0] or module.out_features > SMALL[1])


def _draw(chance: random.Random, _: Data) -> Data:
    return {"precision": "fp8", "compile": chance.choice((False, "block", "block"))}


TECHNIQUE = Technique(
    name="fp8",
    order=60,
    title="fp8",
    covers={"precision": ("fp8",)},
    check_gpu=check_gpu,
    check=check,
    check_device=check_device,
    apply=apply,
    needs={"compile": "block"},
    draw=Draw(alone=_draw),
    offers=lambda recipe: (
        (Offer({"precision": "fp8", "compile": "block"}, numerics="products in fp8", is_slow=True),)
        if recipe.precision == "bf16"
        else ()
    ),
)
