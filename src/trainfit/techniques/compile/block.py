"""Compile by block: each repeated decoder block is compiled in place; the rest runs eagerly.

Equal blocks share one graph, as in torchtitan. With LoRA there are two graphs where the first block's input
needs no gradient.
"""

from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Draw, Offer, Technique
from trainfit.techniques.draft import Draft


def apply(recipe: Recipe, draft: Draft) -> None:
    """Compile every decoder block; refuse a model without repeated blocks."""
    from trainfit.models.layers import require_blocks

    for block in require_blocks(draft.model, "compile", recipe.compile, "use compile: model or false"):
        draft.compiler(block)


TECHNIQUE = Technique(
    name="compile_block",
    order=150,
    title="Compile by block",
    covers={"compile": ("block",)},
    apply=apply,
    describe=lambda recipe: "compile block",
    draw=Draw(weights={"compile": {"block": 1}}),
    offers=lambda recipe: (Offer({"compile": "block"}, is_slow=True, speeds_up="rest"),),
)
