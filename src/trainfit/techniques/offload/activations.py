"""Activation offload: the input of each recomputed block waits in pinned host memory.

It is copied out while the next block computes and back while the block after it runs backward. Source:
https://pytorch.org/blog/activation-checkpointing-techniques/
"""

from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Draw, Expected, Offer, Technique, refusal
from trainfit.techniques.draft import Draft
from trainfit.techniques.recompute import full

FIELD = "offload.activations"


def check(recipe: Recipe) -> None:
    """Refuse blocks that keep more than their input, and a model compiled whole."""
    require_recomputed_blocks(recipe, FIELD, "only the inputs of recomputed blocks are moved")


def require_recomputed_blocks(recipe: Recipe, field: str, reason: str) -> None:
    """Refuse blocks that are not fully recomputed, and a model compiled whole."""
    if recipe.recompute != "full":
        raise refusal(recipe, field, reason, "set recompute: full")
    if recipe.compile == "model":
        raise refusal(
            recipe,
            field,
            "a model that is compiled whole cannot offload block by block",
            "use compile: block or false",
        )


def apply(recipe: Recipe, draft: Draft) -> None:
    """Copy every block's input to the host, and back one block ahead; refuse a model without blocks."""
    from trainfit.checkpointing.whole_block import BlockRecompute
    from trainfit.models.layers import require_blocks
    from trainfit.offload.copies import CopyStreams

    if recipe.offload.weights:
        return  # Then offload/weights.py moves weights and inputs.
    blocks = require_blocks(draft.model, FIELD, True, f"set {FIELD}: false")
    BlockRecompute(blocks, CopyStreams(draft.device), offload=True).install()


def expected(recipe: Recipe) -> Expected:
    """Return the expected effect of recomputing blocks and offloading their inputs."""
    found = full.expected(recipe)
    return found if recipe.offload.activations else found.then(Expected(activations=0.5, time=1.05))


TECHNIQUE = Technique(
    name="offload_activations",
    order=180,
    title="Activation offload",
    covers={FIELD: (True,)},
    check=check,
    apply=apply,
    describe=lambda recipe: "activations on the host",
    needs={"recompute": "full"},
    draw=Draw(alone=lambda chance, _: {"recompute": "full", "offload": {"activations": True}}),
    offers=lambda recipe: (Offer({"offload": {"activations": True}, "recompute": "full"}, expected(recipe)),),
)
