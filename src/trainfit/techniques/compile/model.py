"""Compile the whole model: one graph from token ids to loss, where nothing in the model breaks it."""

from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Draw, Technique
from trainfit.techniques.draft import Draft


def apply(recipe: Recipe, draft: Draft) -> None:
    """Compile the model, or the part of it that the loss calls."""
    draft.compiler(draft.model if draft.body is None else draft.body)


TECHNIQUE = Technique(
    name="compile_model",
    order=160,
    title="Compile the model",
    covers={"compile": ("model",)},
    apply=apply,
    describe=lambda recipe: "compile model",
    draw=Draw(weights={"compile": {"model": 1}}),
    # One graph is scheduled as one, with buffers reused across layers.
    trace_whole=lambda recipe: True,
)
