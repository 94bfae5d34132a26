"""Weights on the host: the decoder blocks' weights wait in pinned host memory, two or three blocks are on the GPU.

The next block's weights come while one computes (ZeRO-Infinity, arXiv:2104.07857, does the same). Blocks are recomputed in
backward, so each is fetched twice a step; a trained one also goes back once, after its optimizer ran, and its moments
wait on the host with it. Embeddings, the last norm and the head stay on the GPU, and so does what is small of the
optimizer's state.

Helps models larger than the card, and where the least memory at a usable speed is wanted. Costs time where a block computes
for less time than its weights need over PCIe: small batches feel it. The largest model it was measured with has 8.5 billion
parameters; what is larger than the card is only predicted.

Costs no quality: it changes no result.

Refuses models without repeated blocks, and blocks that hand on more than hidden states that need a gradient.
"""

from __future__ import annotations

from trainfit.spec.errors import InputError
from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Draft

NAME = "offload_weights"
COVERS = {"offload.weights": (True,)}


def applies(recipe: Recipe) -> bool:
    return recipe.offload.weights


def check(recipe: Recipe) -> None:
    """A block's weights are gone when its backward is over: it must be recomputed, and updated by then."""
    if recipe.recompute != "full":
        raise InputError(
            "the backward would need every block's weights to stay",
            "set recompute: full",
            field="offload.weights",
            value=True,
        )
    if recipe.compile == "model":
        raise InputError(
            "a whole compiled model shows no blocks",
            "use compile: block or false",
            field="offload.weights",
            value=True,
        )
    if recipe.adapter is None and not recipe.optimizer.in_backward:
        raise InputError(
            "a block's weights are gone before an optimizer that runs last could update them",
            "set optimizer.in_backward: true, or train an adapter",
            field="offload.weights",
            value=True,
        )


def num_buffers(recipe: Recipe) -> int:
    """Blocks on the device: one computes, one comes; of trained weights, one goes back."""
    return 2 if recipe.adapter is not None else 3


def apply(recipe: Recipe, draft: Draft) -> None:
    """Each block fetches its weights; with ``offload.activations`` its input waits on the host as well."""
    from trainfit.checkpointing.whole_block import BlockRecompute
    from trainfit.offload.optimizer_state import HostMoments

    hosted = draft.hosted
    assert hosted is not None, "step.assemble builds the model on the host"
    moments = None if recipe.adapter else HostMoments(hosted, lambda: draft.optimizers)
    runs = BlockRecompute(
        hosted.blocks,
        hosted.copy_streams,
        weights=hosted,
        moments=moments,
        offload=recipe.offload.activations,
    )
    runs.install()
