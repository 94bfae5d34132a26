"""Precision: dtype of the weights (fp32, bf16), or autocast over fp32 weights (amp-bf16, amp-fp16).

Autocast is active around the forward only, as in
https://docs.pytorch.org/docs/stable/notes/amp_examples.html.
"""

from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Draw, Technique
from trainfit.techniques.draft import Draft


def apply(recipe: Recipe, draft: Draft) -> None:
    """Enter autocast around the forward; for amp-fp16 create a GradScaler."""
    import torch

    dtype = torch.float16 if recipe.precision == "amp-fp16" else torch.bfloat16
    draft.around_forward.append(lambda: torch.autocast(draft.device.type, dtype=dtype))
    if dtype == torch.float16:
        draft.scaler = torch.amp.GradScaler(draft.device.type)  # pyright: ignore[reportPrivateImportUsage]


TECHNIQUE = Technique(
    name="precision",
    order=190,
    title="Precision",
    covers={"precision": ("fp32", "bf16", "amp-bf16", "amp-fp16")},
    apply=apply,
    when=lambda recipe: recipe.precision.startswith("amp-"),
    variants=({"precision": "amp-fp16"},),
    examples=({"precision": "fp32"}, {"precision": "amp-bf16"}),
    draw=Draw(weights={"precision": {"bf16": 5, "fp32": 2, "amp-bf16": 2, "amp-fp16": 2}}),
)
