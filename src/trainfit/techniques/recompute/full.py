"""Full recomputation: keep each block's input and run its forward again in backward.

Chen et al., arXiv:1604.06174. Always non-reentrant, with random generators restored. On ``hf`` it is the
model's own checkpointing: transformers 5.17 wraps the block's call, 5.23 its forward (so under ``compile:
block`` the checkpoint is inside the graph). Both make the embedding's output require a gradient.
"""

from typing import Any

from trainfit.catalog.load import model_config
from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Draw, Expected, Offer, Technique, refusal
from trainfit.techniques.draft import Draft

RECOMPUTES_FUNCTIONS = (2, 13)
"""The first torch that was seen to; 2.12 was not tried."""


def _applies(recipe: Recipe) -> bool:
    # checkpointing/whole_block.py recomputes blocks that it moves to the host.
    return recipe.recompute == "full" and not (recipe.offload.activations or recipe.offload.weights)


def runs_whole(recipe: Recipe) -> bool:
    """Return whether a compiled block runs again as a whole, because its compiler keeps too much.

    That of torch 2.11 saves what functions of ``torch.autograd.Function`` and some operators of trainfit's
    save, which are in these blocks; that of 2.13 computes it again.
    """
    from trainfit.virtual.cuda.scratch.gpu_traits import installed_torch  # Its package imports torch.

    if recipe.compile != "block" or recipe.hardware.count > 1 or installed_torch() >= RECOMPUTES_FUNCTIONS:
        return False
    has_functions = recipe.block_kernels != "standard" or recipe.fp8_weights != "each-use"
    return has_functions or recipe.accumulation == "fused" or recipe.quantize is not None


def apply(recipe: Recipe, draft: Draft) -> None:
    """Checkpoint every decoder block; refuse a model whose own code has no checkpointing."""
    from trainfit.checkpointing.selective import set_recompute
    from trainfit.models.layers import require_blocks

    if recipe.model.implementation == "native":
        for block in require_blocks(draft.model, "recompute", "full", "use recompute: none"):
            set_recompute(block, "full", whole=runs_whole(recipe))
        return
    model: Any = draft.model
    if not model.supports_gradient_checkpointing:
        remedy = "use recompute: none, or model.implementation: native where it knows the family"
        raise refusal(recipe, "recompute", "this model's code has no checkpointing", remedy)
    if hasattr(model, "activation_checkpointing_enable"):  # the name since transformers 5.23
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def expected(recipe: Recipe) -> Expected:
    """Return the expected effect of full recomputation: blocks keep only their inputs."""
    if recipe.recompute == "full":
        return Expected()
    num_layers = model_config(recipe.model.config).get("num_hidden_layers", 32)
    one_block = 1 / max(1, int(num_layers))  # pyright: ignore[reportArgumentType]
    return Expected(activations=0.05 + one_block, time=1.2)


TECHNIQUE = Technique(
    name="recompute_full",
    order=70,
    title="Full recomputation",
    covers={"recompute": ("full",)},
    apply=apply,
    when=_applies,
    describe=lambda recipe: "recompute full",
    draw=Draw(weights={"recompute": {"none": 2, "full": 1}}),
    offers=lambda recipe: (Offer({"recompute": "full"}, expected(recipe)),),
)
