"""Packed documents: several documents a sequence, of which none attends to another.

A mask [b, 1, s, s] takes the place of plain causal attention, so kernels that take no mask are refused. The
position ids begin anew with each document. ``pack: true`` and ``pack: false`` change no operation of the
step: padding stands at the end, where no token that is learned sees it.
"""

from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Draw, Technique, refusal
from trainfit.techniques.draft import Draft

WITHOUT_MASKS = ("flash", "triton")
"""Attention kernels that take no mask."""


def check(recipe: Recipe) -> None:
    """Refuse kernels, adapters, ranks and compiled models without a mask of documents."""
    if recipe.attention in WITHOUT_MASKS:
        problem = "documents are separated by a mask, which this kernel does not take"
        remedy = "use attention: sdpa, or data.pack: true or false"
        raise refusal(recipe, "attention", problem, remedy)
    if recipe.adapter is not None and recipe.adapter.kind in ("prompt", "prefix", "p-tuning"):
        problem = f"{recipe.adapter.kind} puts its tokens before the first document alone"
        raise refusal(recipe, "data.pack", problem, "use adapter.kind: lora, or data.pack: false")
    for dimension in ("context", "pipeline"):
        if getattr(recipe.mesh, dimension) > 1:
            problem = f"ranks of parallel.{dimension} do not exchange the mask of documents"
            raise refusal(recipe, "data.pack", problem, f"use parallel.{dimension}: 1, or data.pack: true")
    if recipe.compile == "model":
        problem = "a model that is compiled whole builds its mask itself, without documents"
        raise refusal(recipe, "data.pack", problem, "use compile: block, or data.pack: true or false")


def apply(recipe: Recipe, draft: Draft) -> None:
    """Let the model build masks from position ids, and give its batches position ids."""
    from trainfit.models.packed import keep_documents_apart

    context = keep_documents_apart(draft.model)
    if context is not None:
        draft.around_forward.append(context)
    draft.packs_documents = True


TECHNIQUE = Technique(
    name="packed_documents",
    order=205,
    title="Packed documents",
    fields=("data.pack",),
    when=lambda recipe: recipe.data.pack == "documents",
    check=check,
    apply=apply,
    describe=lambda recipe: "documents apart",
    examples=({"data": {"pack": "documents"}},),
    draw=Draw(alone=lambda chance, _: {"data": {"pack": "documents"}, "attention": "sdpa"}),
)
