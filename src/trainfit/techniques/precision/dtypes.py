"""Precision: dtype of the weights (fp32, bf16), or fp32 weights with autocast (amp-bf16, amp-fp16) or FSDP2's
mixed precision (mixed-bf16: shards are gathered in bf16, gradients reduced in fp32).

Autocast is active around the forward only, as in
https://docs.pytorch.org/docs/stable/notes/amp_examples.html.
"""

from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Draw, Expected, Offer, Technique, refusal
from trainfit.techniques.draft import Draft


def check(recipe: Recipe) -> None:
    """Refuse mixed-bf16 without FSDP2, which casts as it gathers."""
    mesh = recipe.mesh
    # With tensor-parallel ranks alone nothing is gathered, and nothing cast.
    has_fsdp = mesh.shards_weights and mesh.data_ranks * mesh.context > 1
    if recipe.precision == "mixed-bf16" and not has_fsdp:
        problem = "mixed-bf16 is FSDP2's own mixed precision"
        remedy = "use precision: amp-bf16, or several GPUs with parallel.strategy: fsdp and parallel.shard"
        raise refusal(recipe, "precision", problem, remedy)


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
    """Offer lower precisions than the recipe's."""
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
    covers={"precision": ("fp32", "bf16", "amp-bf16", "amp-fp16", "mixed-bf16")},
    check=check,
    apply=apply,
    when=lambda recipe: recipe.precision.startswith(("amp-", "mixed-")),
    variants=({"precision": "amp-fp16"},),
    examples=({"precision": "fp32"}, {"precision": "amp-bf16"}),
    draw=Draw(weights={"precision": {"bf16": 5, "fp32": 2, "amp-bf16": 2, "amp-fp16": 2}}),
    offers=_offers,
)
