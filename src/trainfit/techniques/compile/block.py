"""Compile by block: each repeated decoder block is compiled in place; the rest runs eagerly.

Equal blocks share one compiled graph, so compiling takes about as long as one block does. torchtitan does the same. LoRA has
two graphs where the first block's input needs no gradient.

Helps speed wherever blocks are repeated: elementwise work is fused, and less of it is saved for the backward. Gradients come
block by block, so the optimizer in the backward still frees them as it goes; with ``compile: model`` it cannot.

Costs no quality but the rounding of fused operations: what is fused stays in fp32 between its steps. The first step waits
for the compiler.

Refuses models without repeated blocks.
"""

from __future__ import annotations

from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Draw, Technique
from trainfit.techniques.draft import Draft


def apply(recipe: Recipe, draft: Draft) -> None:
    """Hand every decoder block to the compiler.

    Raises:
        InputError: the model has no list of repeated blocks.
    """
    from trainfit.models.layers import require_blocks

    for block in require_blocks(draft.model, "compile", recipe.compile, "use compile: model or false"):
        draft.compiler(block)


TECHNIQUE = Technique(
    name="compile_block",
    order=150,
    title="Compile by block",
    fields=("compile",),
    covers={"compile": ("block",)},
    apply=apply,
    describe=lambda recipe: "compile block",
    examples=({"compile": "block"},),
    draw=Draw(weights={"compile": {"block": 1}}),
)
