"""Weight offload: the decoder blocks' weights wait in pinned host memory; two or three blocks are on the GPU.

As in ZeRO-Infinity, arXiv:2104.07857. Blocks are recomputed, so each is fetched twice a step. A trained block
is also copied back once, after its optimizer ran, with its moments.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Data, Draw, Expected, Offer, Technique, refusal
from trainfit.techniques.draft import Draft
from trainfit.techniques.offload import activations
from trainfit.techniques.offload.activations import require_recomputed_blocks
from trainfit.techniques.optimizer import in_backward
from trainfit.techniques.recompute import full

if TYPE_CHECKING:
    from torch import nn

    from trainfit.offload.blocks import HostBlocks


def check(recipe: Recipe) -> None:
    """Refuse recipes in which a block's weights are needed after its backward."""
    require_recomputed_blocks(
        recipe, "offload.weights", "the backward would need every block's weights to stay"
    )
    if recipe.adapter is None and not recipe.optimizer.in_backward:
        problem = "a block's weights are gone before an optimizer that runs last could update them"
        remedy = "set optimizer.in_backward: true, or train an adapter"
        raise refusal(recipe, "offload.weights", problem, remedy)


def _num_buffers(recipe: Recipe) -> int:
    """Return the number of blocks on the device: one computes, one arrives; a trained one is copied back."""
    return 2 if recipe.adapter is not None else 3


def apply(recipe: Recipe, draft: Draft) -> None:
    """Let each block fetch its weights; ``offload.activations`` also copies its input to the host."""
    from trainfit.checkpointing.whole_block import BlockRecompute
    from trainfit.offload.optimizer_state import HostMoments

    hosted, inputs = draft.hosted, recipe.offload.activations
    assert hosted is not None, "step.assemble builds the model on the host"
    if recipe.adapter is None:
        draft.host_state = HostMoments(
            hosted.parameters, hosted.moments, hosted.copy_streams, lambda: draft.optimizers
        )
    BlockRecompute(
        hosted.blocks, hosted.copy_streams, weights=hosted, moments=draft.host_state, offload=inputs
    ).install()


def _build(
    recipe: Recipe, on_model: Callable[[nn.Module], None], **options: Any
) -> tuple[nn.Module, HostBlocks]:
    from trainfit.models.build import build_on_host

    return build_on_host(recipe.model, num_buffers=_num_buffers(recipe), on_model=on_model, **options)


def _draw(chance: random.Random, recipe: Data) -> Data:
    offload = {"weights": True, "activations": chance.choice((False, True))}
    drawn: Data = {"recompute": "full", "offload": offload}
    if not recipe.get("adapter"):
        drawn["optimizer"] = {"in_backward": chance.choice((True, "block"))}
        drawn["batch"] = {"accumulate": 1}
    return drawn


def _offers(recipe: Recipe) -> tuple[Offer, ...]:
    trained = {} if recipe.adapter else {"optimizer": {"in_backward": "block"}}
    offloads: tuple[Data, ...] = ({"weights": True}, {"weights": True, "activations": True})
    return tuple(
        Offer({"offload": one, "recompute": "full", **trained}, _expected(recipe, one, trained))
        for one in offloads
    )


def _expected(recipe: Recipe, offload: Data, trained: Data) -> Expected:
    found = activations.expected(recipe) if offload.get("activations") else full.expected(recipe)
    if not recipe.offload.weights:
        found = found.then(Expected(weights=0.1, gradients=0.1, optimizer=0.1, time=2.0, to_host=1.0))
    return found.then(in_backward.expected(recipe)) if trained else found


TECHNIQUE = Technique(
    name="offload_weights",
    order=170,
    title="Weight offload",
    covers={"offload.weights": (True,)},
    check=check,
    apply=apply,
    describe=lambda recipe: "weights on the host",
    variants=(
        {"offload": {"weights": True}, "recompute": "full"},
        {"offload": {"weights": True}, "recompute": "full", "adapter": {"kind": "lora"}},
    ),
    needs={"recompute": "full", "optimizer": {"in_backward": True}},
    draw=Draw(alone=_draw),
    build=_build,
    min_repeated=_num_buffers,
    # Which weights are still on the device depends on timing between compiled layers.
    offers=_offers,
)
