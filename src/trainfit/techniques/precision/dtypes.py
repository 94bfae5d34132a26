"""Precision: the weights' own dtype (fp32, bf16; fp8.py adds products), or autocast over fp32 weights (amp-bf16, amp-fp16).

amp-fp16 adds a GradScaler: fp16's smallest normal number is 6.1e-5, so the loss is scaled up before backward and
the gradients down before the update; a step whose gradients overflow is skipped. As in torch's own recipe,
https://docs.pytorch.org/docs/stable/notes/amp_examples.html: autocast around forward only.

Helps, as bf16, wherever the GPU multiplies faster in 16 bits: half the memory of weights, gradients, moments and most
activations. amp-bf16 has the speed of 16-bit products without rounding weights; its memory is nearer to fp32's, since
autocast also keeps 16-bit copies of the weights until the backward has used them.

Costs, as bf16, updates below 2^-9 of a weight, which are lost when rounded to nearest (see stochastic rounding). amp-* keeps
the weights in fp32; amp-fp16 has less range than bf16 and three bits more.

Refuses nothing.
"""

from __future__ import annotations

from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Draw, Technique
from trainfit.techniques.draft import Draft


def apply(recipe: Recipe, draft: Draft) -> None:
    """Autocast around forward; for amp-fp16 a GradScaler."""
    import torch

    dtype = torch.float16 if recipe.precision == "amp-fp16" else torch.bfloat16
    draft.around_forward.append(lambda: torch.autocast(draft.device.type, dtype=dtype))
    if dtype == torch.float16:
        draft.scaler = torch.amp.GradScaler(draft.device.type)  # pyright: ignore[reportPrivateImportUsage]


TECHNIQUE = Technique(
    name="precision",
    order=190,
    title="Precision",
    fields=("precision",),
    covers={"precision": ("fp32", "bf16", "amp-bf16", "amp-fp16")},
    apply=apply,
    when=lambda recipe: recipe.precision.startswith("amp-"),
    variants=({"precision": "amp-fp16"},),
    examples=({"precision": "fp32"}, {"precision": "amp-bf16"}),
    draw=Draw(weights={"precision": {"bf16": 5, "fp32": 2, "amp-bf16": 2, "amp-fp16": 2}}),
)
