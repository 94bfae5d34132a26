"""Gradient clipping: scale all gradients down where their joint norm exceeds ``clip_norm``.

As ``torch.nn.utils.clip_grad_norm_`` (Pascanu et al., arXiv:1211.5063), but the norm is computed in fp32
for every dtype, and one decoder block after the other, so its scratch memory is that of one block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Draw, Technique, refusal
from trainfit.techniques.draft import Draft

if TYPE_CHECKING:
    import torch
    from torch import nn

LEAST_NORM = 1e-6  # Added to the norm before dividing by it, as torch does


def check(recipe: Recipe) -> None:
    """Refuse an optimizer in the backward: the norm needs every gradient."""
    if recipe.optimizer.in_backward:
        problem = "an optimizer in the backward frees each gradient before the norm of all is known"
        remedy = "leave clip_norm out, or set optimizer.in_backward: false"
        raise refusal(recipe, "optimizer.clip_norm", problem, remedy)


def apply(recipe: Recipe, draft: Draft) -> None:
    """Clip before each update, and report the norm as ``readings["gradient_norm"]``."""
    largest = recipe.optimizer.clip_norm
    assert largest is not None
    blocks, others = draft.trainable_by_block()
    # CUDA's foreach kernels require one dtype, DTensor's sum of norms one mesh.
    parts = [
        [parameter for parameter in group if _kind(parameter) == kind]
        for group in (*blocks, others)
        for kind in dict.fromkeys(_kind(parameter) for parameter in group)
    ]

    def clip() -> None:
        draft.readings["gradient_norm"] = clip_gradients(parts, largest)

    draft.before_update.append(clip)


def _kind(parameter: nn.Parameter) -> tuple[torch.dtype, object]:
    return parameter.dtype, getattr(parameter, "device_mesh", None)


def clip_gradients(parts: list[list[nn.Parameter]], largest: float) -> torch.Tensor:
    """Scale the gradients of all parts in place.

    Returns:
        Their norm before, [] fp32. The gradients of one part have one dtype and mesh.
    """
    import torch

    with torch.no_grad():
        gradients = [found for part in parts if (found := [p.grad for p in part if p.grad is not None])]
        total = torch.zeros((), device=gradients[0][0].device)
        for part in gradients:
            # dtype: bf16's squares are summed in fp32, but the norm would be rounded to bf16.
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(part, 2.0, dtype=torch.float32)))
            torch.hypot(norm, total, out=total)
        scale = (largest / (total + LEAST_NORM)).clamp_(max=1.0)
        # In another dtype than the gradients' it would be one kernel a gradient.
        scales = {dtype: scale.to(dtype) for dtype in dict.fromkeys(part[0].dtype for part in gradients)}
        for part in gradients:
            # Unconditional: testing the scale would wait for the device.
            torch._foreach_mul_(part, scales[part[0].dtype])
    return total


TECHNIQUE = Technique(
    name="gradient_clipping",
    order=310,
    title="Gradient clipping",
    fields=("optimizer.clip_norm",),
    check=check,
    apply=apply,
    when=lambda recipe: recipe.optimizer.clip_norm is not None,
    describe=lambda recipe: f"clipped to {recipe.optimizer.clip_norm:g}",
    examples=({"optimizer": {"clip_norm": 1.0}},),
    draw=Draw(alone=lambda chance, _: {"optimizer": {"clip_norm": 1.0, "in_backward": False}}),
)
