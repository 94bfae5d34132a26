"""Full recomputation: keep only each block's input, run the block's forward again in backward.

Chen et al., https://arxiv.org/abs/1604.06174. Always non-reentrant. Random generators are saved and restored, so
dropout repeats itself. On ``hf`` it is the model's own checkpointing, whatever that does in the installed version
(5.17 wraps the block's call, 5.23 its forward, so under ``compile: block`` the checkpoint is inside the graph there; both
make the embedding's output require a gradient, which costs LoRA a backward through all of the first block); on ``native``
each block's forward is wrapped here.

Helps whenever activations are what does not fit, at the price of about one more forward: most with long sequences and large
batches. With it gradients and logits become the peak: the optimizer in the backward and a chunked loss go on from there.

Costs no quality: gradients are equal bit for bit.

Refuses ``hf`` models whose code has no checkpointing.
"""

from __future__ import annotations

from typing import Any

from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Draw, Technique
from trainfit.techniques.draft import Draft


def _applies(recipe: Recipe) -> bool:
    # Blocks that move to the host are recomputed by what moves them (block_runs.py).
    return recipe.recompute == "full" and not (recipe.offload.activations or recipe.offload.weights)


def apply(recipe: Recipe, draft: Draft) -> None:
    """Checkpoint every decoder block.

    Raises:
        InputError: the model's own code has no checkpointing.
    """
    from trainfit.checkpointing.selective import set_recompute
    from trainfit.models.layers import require_blocks

    if recipe.model.implementation == "hf":
        _enable_own(draft.model)
    else:
        for block in require_blocks(draft.model, "recompute", "full", "use recompute: none"):
            set_recompute(block, "full")


def _enable_own(model: Any) -> None:
    if not model.supports_gradient_checkpointing:
        raise InputError(
            "this model's code has no checkpointing",
            "use recompute: none, or model.implementation: native where it knows the family",
            field="recompute",
            value="full",
        )
    if hasattr(model, "activation_checkpointing_enable"):  # the name since transformers 5.23
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


TECHNIQUE = Technique(
    name="recompute_full",
    order=70,
    title="Full recomputation",
    fields=("recompute",),
    covers={"recompute": ("full",)},
    apply=apply,
    when=_applies,
    describe=lambda recipe: "recompute full",
    examples=({"recompute": "full"},),
    draw=Draw(weights={"recompute": {"none": 2, "full": 1}}),
)
