"""Precision: dtype of the weights (fp32, bf16, fp16-pure), or fp32 weights with autocast (amp-bf16, amp-fp16)
or FSDP2's mixed precision (mixed-bf16: shards are gathered in bf16, gradients reduced in fp32).

bf16-master computes with bf16 weights and updates fp32 master weights with fp32 moments (Micikevicius et al.,
arXiv:1710.03740, section 3.1). With FSDP2 that is mixed-bf16: the fp32 shards are the master weights. Else
the model is bf16, and the optimizer keeps the master weights as a state and rounds them to the model's.
fp16-master is the same in fp16, and scales the loss: its gradients have 5 bits of exponent, not 8. Its update
divides them by the scale in fp32. fp16-pure keeps no master weights, as bf16 keeps none.

Autocast is active around the forward only, as in
https://docs.pytorch.org/docs/stable/notes/amp_examples.html.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainfit.spec.hardware import LEAST_FOR_TRITON
from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Draw, Expected, Offer, Technique, refusal
from trainfit.techniques.draft import Draft

if TYPE_CHECKING:
    from trainfit.spec.hardware import Gpu


def check_gpu(recipe: Recipe, gpu: Gpu) -> None:
    """Refuse master weights in the optimizer on an NVIDIA GPU older than Triton supports."""
    capability = gpu.compute_capability
    if recipe.optimizer_keeps_master and capability is not None and capability < LEAST_FOR_TRITON:
        problem = f"{gpu.title} is older than Triton supports, which updates the master weights"
        raise refusal(recipe, "precision", problem, "use precision: amp-fp16, or a newer GPU")


def check(recipe: Recipe) -> None:
    """Refuse mixed-bf16 without FSDP2, which casts as it gathers, and bf16-master without fp32 copies."""
    # With tensor-parallel ranks alone nothing is gathered, so nothing is cast.
    if recipe.precision == "mixed-bf16" and not recipe.has_fsdp:
        problem = "mixed-bf16 is FSDP2's own mixed precision"
        remedy = "use precision: bf16-master, or several GPUs with parallel.strategy: fsdp and parallel.shard"
        raise refusal(recipe, "precision", problem, remedy)
    if recipe.precision == "fp16-master" and recipe.has_fsdp:
        remedy = "use precision: bf16-master, or parallel.strategy: ddp"
        raise refusal(recipe, "precision", "FSDP2's shards are gathered in bf16 here", remedy)
    if recipe.precision in ("bf16-master", "fp16-master"):
        _check_master(recipe)


def _check_master(recipe: Recipe) -> None:
    """Refuse adapters, and optimizers that keep no fp32 copy of 16-bit weights."""
    optimizer, kind = recipe.optimizer, recipe.precision.removesuffix("-master")
    if recipe.adapter is not None:
        problem = "only the adapter trains, and adapter.dtype is its dtype"
        plain = "bf16" if kind == "bf16" else "fp16-pure"
        raise refusal(recipe, "precision", problem, f"use precision: {plain}")
    if not recipe.optimizer_keeps_master:
        return
    if optimizer.name != "adamw":
        problem = (
            f"without FSDP2 AdamW alone keeps fp32 master weights, and the optimizer is {optimizer.name}"
        )
        remedy = f"use optimizer.name: adamw, or precision: amp-{kind}, whose weights are fp32"
        raise refusal(recipe, "precision", problem, remedy)
    if optimizer.implementation != "fused":
        problem = f"AdamW's {optimizer.implementation} implementation keeps no fp32 master weights"
        raise refusal(recipe, "optimizer.implementation", problem, "use fused, or leave it out")


def apply(recipe: Recipe, draft: Draft) -> None:
    """Enter autocast around the forward; where the backward computes in fp16, create a GradScaler."""
    import torch

    if recipe.precision.startswith("amp-"):
        dtype = torch.float16 if recipe.precision == "amp-fp16" else torch.bfloat16
        draft.around_forward.append(lambda: torch.autocast(draft.device.type, dtype=dtype))
    if recipe.precision == "amp-fp16":
        draft.scaler = torch.amp.GradScaler(draft.device.type)  # pyright: ignore[reportPrivateImportUsage]
    elif recipe.scales_loss:
        from trainfit.optim.loss_scaler import HalfGradScaler

        draft.scaler = HalfGradScaler(draft.device.type)


def _offers(recipe: Recipe) -> tuple[Offer, ...]:
    """Offer lower precisions than the recipe's; for bf16-master none."""
    narrow = Expected(activations=0.6)
    halved = narrow._replace(weights=0.5, gradients=0.5, optimizer=0.5)
    amp = Offer({"precision": "amp-bf16"}, narrow, numerics="products in bf16")
    whole = Offer({"precision": "bf16"}, halved, numerics="bf16 weights without fp32 master weights")
    mixed = Offer({"precision": "mixed-bf16"}, narrow, numerics="products in bf16")
    if recipe.precision == "fp32":
        return (amp, whole, mixed) if recipe.hardware.count > 1 else (amp, whole)
    return (whole,) if recipe.precision in ("amp-bf16", "amp-fp16", "mixed-bf16") else ()


TECHNIQUE = Technique(
    name="precision",
    order=190,
    title="Precision",
    covers={
        "precision": (
            "fp32",
            "bf16",
            "bf16-master",
            "amp-bf16",
            "amp-fp16",
            "mixed-bf16",
            "fp16-master",
            "fp16-pure",
        ),
    },
    check_gpu=check_gpu,
    check=check,
    apply=apply,
    when=lambda recipe: recipe.precision.startswith(("amp-", "mixed-", "bf16-", "fp16-")),
    variants=({"precision": "amp-fp16"}, {"precision": "bf16-master"}),
    examples=({"precision": "fp32"}, {"precision": "amp-bf16"}),
    draw=Draw(weights={"precision": {"bf16": 5, "fp32": 2, "amp-bf16": 2, "amp-fp16": 2}}),
    offers=_offers,
)
