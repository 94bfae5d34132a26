"""Precision: dtype of the weights (fp32, bf16), or fp32 weights with autocast (amp-bf16, amp-fp16) or FSDP2's
mixed precision (mixed-bf16: shards are gathered in bf16, gradients reduced in fp32).

bf16-master computes with bf16 weights and updates fp32 master weights with fp32 moments (Micikevicius et al.,
arXiv:1710.03740, section 3.1). With FSDP2 that is mixed-bf16: the fp32 shards are the master weights. Else
the model is bf16, and the optimizer keeps the master weights as a state and rounds them to the model's.

Autocast is active around the forward only, as in
https://docs.pytorch.org/docs/stable/notes/amp_examples.html.
"""

from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Draw, Expected, Offer, Technique, refusal
from trainfit.techniques.draft import Draft


def check(recipe: Recipe) -> None:
    """Refuse mixed-bf16 without FSDP2, which casts as it gathers, and bf16-master without fp32 copies."""
    # With tensor-parallel ranks alone nothing is gathered, so nothing is cast.
    if recipe.precision == "mixed-bf16" and not recipe.has_fsdp:
        problem = "mixed-bf16 is FSDP2's own mixed precision"
        remedy = "use precision: bf16-master, or several GPUs with parallel.strategy: fsdp and parallel.shard"
        raise refusal(recipe, "precision", problem, remedy)
    if recipe.precision == "bf16-master":
        _check_master(recipe)


def _check_master(recipe: Recipe) -> None:
    """Refuse adapters, and optimizers that keep no fp32 copy of bf16 weights."""
    optimizer = recipe.optimizer
    if recipe.adapter is not None:
        problem = "only the adapter trains, and adapter.dtype is its dtype"
        raise refusal(recipe, "precision", problem, "use precision: bf16")
    if not recipe.optimizer_keeps_master:
        return
    if optimizer.name != "adamw":
        problem = (
            f"without FSDP2 AdamW alone keeps fp32 master weights, and the optimizer is {optimizer.name}"
        )
        remedy = "use optimizer.name: adamw, or precision: amp-bf16, whose weights are fp32"
        raise refusal(recipe, "precision", problem, remedy)
    if optimizer.implementation != "fused":
        problem = f"AdamW's {optimizer.implementation} implementation keeps no fp32 master weights"
        raise refusal(recipe, "optimizer.implementation", problem, "use fused, or leave it out")


def apply(recipe: Recipe, draft: Draft) -> None:
    """Enter autocast around the forward; for amp-fp16 create a GradScaler."""
    if not recipe.precision.startswith("amp-"):
        return
    import torch

    dtype = torch.float16 if recipe.precision == "amp-fp16" else torch.bfloat16
    draft.around_forward.append(lambda: torch.autocast(draft.device.type, dtype=dtype))
    if dtype == torch.float16:
        draft.scaler = torch.amp.GradScaler(draft.device.type)  # pyright: ignore[reportPrivateImportUsage]


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
    covers={"precision": ("fp32", "bf16", "bf16-master", "amp-bf16", "amp-fp16", "mixed-bf16")},
    check=check,
    apply=apply,
    when=lambda recipe: recipe.precision.startswith(("amp-", "mixed-", "bf16-")),
    variants=({"precision": "amp-fp16"}, {"precision": "bf16-master"}),
    examples=({"precision": "fp32"}, {"precision": "amp-bf16"}),
    draw=Draw(weights={"precision": {"bf16": 5, "fp32": 2, "amp-bf16": 2, "amp-fp16": 2}}),
    offers=_offers,
)
