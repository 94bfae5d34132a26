"""Compile the whole model: one graph from token ids to loss, where nothing in the model breaks it."""

from trainfit.catalog.names import CPU
from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Draw, Technique
from trainfit.techniques.draft import Draft

COMPARED = (2, 13)
"""The first PyTorch whose programs of a few layers were compared with those of all."""


def apply(recipe: Recipe, draft: Draft) -> None:
    """Compile the model, or the part of it that the loss calls."""
    draft.compiler(draft.model if draft.body is None else draft.body)


def _trace_whole(recipe: Recipe) -> bool:
    """Return whether a layer's operations or memory depend on all layers, and not on its neighbours alone.

    A knapsack over all layers spends a memory budget. Gradients are reduced in buckets. An optimizer in the
    backward follows autograd's order of equal nodes. A CPU's program has no estimate of peak memory. The
    order in which an older Inductor runs kernels has not been compared with the whole model's.
    """
    from trainfit.virtual.cuda.scratch.gpu_traits import installed_torch  # Its package imports torch.

    return (
        installed_torch() < COMPARED
        or recipe.recompute not in ("none", "full", "selective")
        or bool(recipe.optimizer.in_backward)
        or recipe.hardware.count > 1
        or recipe.hardware.gpu == CPU
    )


TECHNIQUE = Technique(
    name="compile_model",
    order=160,
    title="Compile the model",
    covers={"compile": ("model",)},
    apply=apply,
    describe=lambda recipe: "compile model",
    draw=Draw(weights={"compile": {"model": 1}}),
    trace_whole=_trace_whole,
)
