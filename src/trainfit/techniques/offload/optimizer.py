"""Optimizer offload: the optimizer's state waits in pinned host memory and is streamed through the GPU.

The state of one decoder block, or of one weight outside the blocks, is on the GPU while it is updated there;
the next one's arrives and the last one's goes back meanwhile. So all of it is copied in and out once a step.
ZeRO-Offload (Ren et al., arXiv:2101.06840) runs the update on the CPU instead, and copies gradients and
weights; here the arithmetic is that of the optimizer without offload.
"""

from __future__ import annotations

from trainfit.spec.recipe import Recipe
from trainfit.techniques import registry
from trainfit.techniques.base import Draw, Expected, Offer, Technique, refusal
from trainfit.techniques.draft import Draft

FIELD = "offload.optimizer"
NUM_BUFFERS = 3
"""Parts of the state on the GPU: one is updated, one arrives, one goes back."""


def check(recipe: Recipe) -> None:
    """Refuse several GPUs, state that moves with the weights, and optimizers without any that could move."""
    name, facts = recipe.optimizer.name, registry.optimizer_facts(recipe.optimizer.name)
    if recipe.hardware.count > 1:
        problem = "the state of several GPUs stays on them"
        remedy = "use one GPU, or parallel.strategy: fsdp or zero1, which shard it"
        raise refusal(recipe, FIELD, problem, remedy)
    if recipe.offload.weights:
        problem = "offload.weights moves the state of the blocks' weights with them"
        raise refusal(recipe, FIELD, problem, "set one of the two")
    if name.startswith("paged-"):
        raise refusal(recipe, FIELD, "paged state is in the host's memory already", "set one of the two")
    if facts is not None and min(facts.moments(recipe, recipe.weight_bytes), default=0) < 1:
        problem = f"{name} keeps no state of a byte or more for each weight, and the rest does not move"
        raise refusal(recipe, FIELD, problem, "leave it out, or use optimizer.name: adamw or adamw8bit")


def apply(recipe: Recipe, draft: Draft) -> None:
    """Make an optimizer for each block and each other weight, and stream their state."""
    from trainfit.offload.optimizer_state import parameters_of, streamed

    place = {id(parameter): number for number, parameter in enumerate(draft.trainable())}
    if not draft.steps_in_backward:
        blocks, others = draft.trainable_by_block()
        groups = [*blocks, *([parameter] for parameter in others)]
        groups.sort(key=lambda group: place[id(group[0])])
        draft.optimizers = [one for group in groups for one in draft.optimizers_for(group)]
    # A backward reaches the model's last weights first.
    in_order = sorted(draft.optimizers, key=lambda one: min(place[id(p)] for p in parameters_of(one)))
    draft.host_state = streamed(
        in_order, draft.device, num_buffers=NUM_BUFFERS, last_first=draft.steps_in_backward
    )


def _expected(recipe: Recipe) -> Expected:
    """Return what is expected of a recipe whose state stayed on the device, AdamW's without offload."""
    return Expected() if recipe.offload.optimizer else Expected(optimizer=0.1, time=1.5, to_host=0.7)


TECHNIQUE = Technique(
    name="offload_optimizer",
    order=305,
    title="Optimizer offload",
    covers={FIELD: (True,)},
    check=check,
    apply=apply,
    describe=lambda recipe: "optimizer state on the host",
    variants=({"offload": {"optimizer": True}, "optimizer": {"in_backward": "block"}},),
    draw=Draw(alone=lambda chance, _: {"offload": {"optimizer": True}}),
    take_turns=lambda recipe: NUM_BUFFERS,
    offers=lambda recipe: (Offer({"offload": {"optimizer": True}}, _expected(recipe)),),
)
