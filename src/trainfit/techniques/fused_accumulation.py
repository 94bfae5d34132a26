"""Fused gradient accumulation: the product of a weight's gradient adds to the sum of the micro-batches.

Saved: a kernel for each weight and micro-batch that reads two gradients and writes one, and the memory of
the second. The sum is rounded once for each micro-batch, instead of the product and the sum apart. Of an
embedding only the rows of a micro-batch's tokens are read and written.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from trainfit.catalog.load import gpu as find_gpu
from trainfit.spec.hardware import LEAST_FOR_TRITON
from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Data, Draw, Expected, Offer, Technique, refusal
from trainfit.techniques.draft import Draft
from trainfit.techniques.precision import fp8_scaling

if TYPE_CHECKING:
    from torch import nn

FIELD = "accumulation"
REMEDY = "use accumulation: standard"
PRECISIONS = ("fp32", "bf16", "bf16-master", "fp16-master", "fp16-pure")
"""Those whose products have the dtype of weights and gradients; fp8's are apart."""


def check(recipe: Recipe) -> None:
    """Refuse recipes without a sum, and those whose gradients are not the products' alone."""
    if recipe.batch.accumulate == 1:
        problem = "with one micro-batch a step there is nothing to add to"
        raise refusal(recipe, FIELD, problem, f"set batch.accumulate, or {REMEDY}")
    if recipe.precision == "fp8":
        if recipe.block_kernels != "fp8" and recipe.fp8_weights == "each-use":
            problem = "torchao's fp8 layers give autograd each micro-batch's gradient"
            raise refusal(recipe, FIELD, problem, f"{REMEDY}, or fp8_weights: scales")
    elif recipe.precision not in PRECISIONS:
        problem = f"{recipe.precision} multiplies in another dtype than that of the gradients"
        raise refusal(recipe, FIELD, problem, f"{REMEDY}, or precision: bf16 or bf16-master")
    if recipe.hardware.count > 1:
        problem = "gradients of several ranks are reduced by hooks that a sum within the product passes by"
        raise refusal(recipe, FIELD, problem, f"{REMEDY}, or hardware.count: 1")
    if recipe.adapter is not None:
        raise refusal(recipe, FIELD, "the base's weights have no gradients", REMEDY)
    if recipe.offload.weights or recipe.offload.activations:
        problem = "offload would move the kept gradients to the host"
        raise refusal(recipe, FIELD, problem, f"{REMEDY}, or offload.weights and .activations: false")


def check_device(recipe: Recipe, device_type: str) -> None:
    """Refuse fp8 on a GPU where the library of the products that add cannot be loaded.

    Raises:
        InputError: there is none.
    """
    if device_type == "cuda" and recipe.precision == "fp8":
        from trainfit.kernels.weight_gradient import cublaslt

        cublaslt.library()


def apply(recipe: Recipe, draft: Draft) -> None:
    """Replace the blocks' linear layers before they are compiled, and embeddings; zero the gradients after
    each update.
    """
    from trainfit.models.kept_gradients import keep_gradients

    embeddings = _runs_triton(recipe, draft)
    kept = keep_gradients(
        draft.model, recomputed=recipe.recompute != "none", embeddings=embeddings, head=_head(recipe, draft)
    )
    draft.before_batch.append(kept.begin_batch)
    draft.after_step.append(kept.end_step)


def _runs_triton(recipe: Recipe, draft: Draft) -> bool:
    """Return whether the embedding's kernel, in Triton, runs on the GPU; on a CPU PyTorch takes its place."""
    from trainfit.kernels.custom_op import has_module

    if draft.runs_on_cpu(recipe):
        return True
    capability = find_gpu(recipe.hardware.gpu).compute_capability
    is_known = capability is not None and capability >= LEAST_FOR_TRITON
    return is_known and (draft.device.type != "cuda" or has_module("triton"))


def _head(recipe: Recipe, draft: Draft) -> nn.Linear | None:
    """Return the output layer whose gradient the fused loss adds, in one chunk; None: it is autograd's.

    Several chunks would round the sum of the micro-batches once each; apart, only their own sum is.
    """
    if recipe.loss != "fused":
        return None
    from torch import nn

    from trainfit.kernels.cross_entropy.fused import is_one_chunk
    from trainfit.models.language_head import Setting, language_head

    head = language_head(draft.model, Setting("loss", recipe.loss, "use loss: standard")).layer
    weight, num_tokens = head.weight, recipe.micro_sequences * recipe.batch.seq
    is_plain = type(head).forward is nn.Linear.forward and head.bias is None and weight.requires_grad
    vocabulary, hidden_size = weight.shape
    return head if is_plain and is_one_chunk(num_tokens, hidden_size, vocabulary, weight.dtype) else None


def _draw(chance: random.Random, recipe: Data) -> Data:
    """Draw two or more micro-batches."""
    batch = recipe["batch"] | {"accumulate": chance.choice((2, 3, 4))}
    return {FIELD: "fused", "precision": chance.choice(PRECISIONS[:3]), "batch": batch}


def _offers(recipe: Recipe) -> tuple[Offer, ...]:
    """Offer it, in fp8 together with the kernels whose layers it is for, and with their kinds of scaling.

    The planner takes of offers that set the same field only one.
    """
    expected = Expected(time=0.97)
    if recipe.precision != "fp8":
        return (Offer({FIELD: "fused"}, expected),)
    fields: Data = {FIELD: "fused", **fp8_scaling.KERNELS}
    delayed = fields | {fp8_scaling.FIELD: "delayed"}
    return (
        Offer(fields, expected, is_slow=True),
        Offer(delayed, expected, numerics=fp8_scaling.NUMERICS, is_slow=True),
    )


TECHNIQUE = Technique(
    name="fused_accumulation",
    order=68,
    title="Fused gradient accumulation",
    covers={FIELD: ("fused",)},
    check=check,
    check_device=check_device,
    apply=apply,
    describe=lambda recipe: "fused accumulation",
    needs={"batch": {"micro": 1, "accumulate": 4}},
    draw=Draw(alone=_draw),
    offers=_offers,
)
